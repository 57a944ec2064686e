"""All mutations."""

from tests.mutations.criticising import CRITICISING
from tests.mutations.learning import LEARNING
from tests.mutations.playing import PLAYING
from tests.mutations.prompting import PROMPTING
from tests.mutations.running import RUNNING

MUTATIONS = (*CRITICISING, *LEARNING, *PLAYING, *PROMPTING, *RUNNING)
