"""A checkpoint of another person: its tensors are loaded, and no code in it runs."""

import pytest
import torch

from tests.support.policy_setup import all_same
from tests.support.ranks import on_ranks, per_world
from tests.support.unpickled import Written


@per_world("mode", {1: ("zero0", "zero1", "zero3")})
@on_ranks
def test_code_in_a_file_of_a_checkpoint_does_not_run(setup, mode):
    folder, policy = setup.new_folder(), setup.policy("float32", mode, setup.adamw())
    policy.update(setup.batch(setup.rows), setup.objective)
    policy.save(folder)
    before, code_ran = setup.everywhere(policy), folder / "code ran"
    files = sorted((folder / "deepspeed").iterdir())
    assert len(files) == 1 + (mode != "zero0")
    for file in files:
        whole = file.read_bytes()
        state = torch.load(file, weights_only=False)
        for hostile in (Written(code_ran), {**state, "more": Written(code_ran)}):
            torch.save(hostile, file)
            refused = rf"^\S*{file.name} is not loaded, .* could be harmful: resume from another"
            with pytest.raises(ValueError, match=refused):
                policy.load(folder)
            assert not code_ran.exists()
        file.write_bytes(whole)
    policy.load(folder)
    assert all_same(setup.everywhere(policy), before)
