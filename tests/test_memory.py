"""What trades time for memory; training with it is in `test_launchers` and `test_flow`."""

from __future__ import annotations

import pytest
from torch import nn

from dflash import memory


def test_a_torch_that_marks_sharded_modules_in_another_way_is_refused_loudly() -> None:
    with pytest.raises(RuntimeError, match="marks sharded modules in another way than by `_is_fsdp_managed_module`"):
        memory._name_as_unsharded(nn.Linear(1, 1))
