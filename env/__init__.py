"""What the environment is: its locks, its identity, the gate before a launch, its compile caches.

Nothing here imports torch or dflash at module level: this package must work before either exists.
"""
