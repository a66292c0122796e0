"""Benchmarks: what takes a user's time, against the least that it could take here and against somebody else's way.

Each module measures one part of the product with the product's own functions, after its result was compared with the
peer's. `suite` runs them, `measure` takes the times, `machine` the rates that floors are made of, `show` prints.
"""

NAMES = {
    "pass": "one training pass of the drafter, forward and backward, compiled as in training",
    "mask": "the block mask of flex attention, made anew for every pass",
    "loss": "the loss through a head of 151,936 tokens: seconds and memory",
    "features": "the target's hidden states that a pass reads",
    "responses": "the target's own responses, as samples are written",
    "gradients": "gradients of two drafters summed between two processes",
    "packing": "documents packed into rows",
    "shards": "files of features written and read, with their digests",
    "seeding": "a sealed compile cache copied to this node, and checked",
}
"""The closed set, and what each is about; without torch, so that a wrong name is told at once."""
