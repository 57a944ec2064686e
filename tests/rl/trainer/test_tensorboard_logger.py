"""TensorBoard, read back by its own reader."""

import math

import pytest

from rl.runtime.folder import RunFolder
from rl.trainer.tensorboard_logger import TensorBoardLogger


def curves(folder):
    """Return (step, value) of each metric, as TensorBoard shows them."""
    from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator
    from tensorboard.util.tensor_util import make_ndarray

    path = str(RunFolder(folder).tensorboard)
    plain = event_accumulator.EventAccumulator(path).Reload()
    found = {
        name: [(event.step, event.value) for event in plain.Scalars(name)]
        for name in plain.Tags()["scalars"]
    }
    (text,) = plain.Tensors("my run/text_summary")[-1].tensor_proto.string_val
    assert text.decode().strip() == "seed: 0"
    # The pages of TensorBoard use the other reader, which ignores a folder's first start.
    shown = plugin_event_accumulator.EventAccumulator(path).Reload()
    for name, events in found.items():
        values = [(each.step, make_ndarray(each.tensor_proto)) for each in shown.Tensors(name)]
        assert values == events
    return found


def started(folder):
    logger = TensorBoardLogger()
    logger.start(folder, "my run", {"seed": 0})
    return logger


def test_every_step_is_there_as_soon_as_it_was_logged(tmp_path):
    logger = started(tmp_path)
    logger.log(0, {"train/reward": 0.25, "train/loss": math.nan, "eval/reward": None})
    logger.log(1, {"train/reward": 0.5})
    assert curves(tmp_path) == {"train/reward": [(0, 0.25), (1, 0.5)]}  # not yet finished
    logger.finish()
    logger.log(2, {"train/reward": 0.75})  # nothing, and no error
    assert curves(tmp_path) == {"train/reward": [(0, 0.25), (1, 0.5)]}


def test_a_resumed_run_writes_no_step_twice(tmp_path):
    first = started(tmp_path)
    for step in range(5):
        first.log(step, {"train/reward": step})
    RunFolder(tmp_path).checkpoint(3).mkdir(parents=True)  # killed at step 5: 3 and 4 are lost
    again = started(tmp_path)
    for step in range(3, 6):
        again.log(step, {"train/reward": 10 * step})
    expected = [(0, 0), (1, 1), (2, 2), (3, 30), (4, 40), (5, 50)]
    assert curves(tmp_path) == {"train/reward": expected}


def test_a_run_without_a_checkpoint_that_starts_again_writes_no_step_twice(tmp_path):
    for factor in (1, 10):
        logger = started(tmp_path)
        for step in range(3):
            logger.log(step, {"train/reward": factor * step})
        logger.finish()
    assert curves(tmp_path) == {"train/reward": [(0, 0), (1, 10), (2, 20)]}


@pytest.mark.parametrize("broken", ["at the start", "later"])
def test_a_folder_that_cannot_be_written_is_a_warning_and_no_end_of_the_run(
    tmp_path, caplog, broken
):
    if broken == "at the start":
        RunFolder(tmp_path).tensorboard.write_text("no folder")
    logger = started(tmp_path)
    if broken == "later":
        logger._writer.close()
        logger._writer.file_writer = None  # what writes to it raises

        def fail(*_):
            raise OSError("No space left on device")

        logger._writer.add_scalar = fail
    for step in range(3):
        logger.log(step, {"train/reward": 0.5})
    logger.finish()
    assert len(caplog.records) == 1
    assert "TensorBoardLogger logs nothing more" in caplog.text
