"""A process group of one rank, for tests without tests/support/ranks.py."""

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def one_rank():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()
