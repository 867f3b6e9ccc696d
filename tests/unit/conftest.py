"""What unit tests of the models share."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from megatron_kd.config import ParallelismConfig
from megatron_kd.device import select_device
from megatron_kd.models.parallel import init_model_parallel


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One rank."""
    select_device("cpu")
    if not dist.is_initialized():
        store = tmp_path_factory.mktemp("rendezvous") / "store"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    return init_model_parallel(ParallelismConfig(), seed=3)
