"""How an evaluation that cannot go on ends."""

import pytest

from rl.config.schema import ConfigError
from rl.evaluation.served import failing
from rl.run.failure import RunFailed


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError(["the folder holds a run by now"]), ConfigError),
        (ValueError("no such split"), RunFailed),
        (ExceptionGroup("", [RunFailed("vLLM ended")]), RunFailed),
        (KeyError("a bug"), KeyError),
    ],
)
def test_what_is_wrong_with_the_configuration_stays_that_wherever_it_is_noticed(error, kind):
    with pytest.raises(kind), failing():
        raise error
