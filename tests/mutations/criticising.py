"""Mistakes in the critic: estimation, positions of rewards, rows of tokens."""

from tests.mutations.mutation import mutation

CRITICISING = (
    mutation(
        "gae: the next value is missing",
        "losses/gae.py",
        "delta = rewards[:, step] + gamma * next_value - values[:, step]",
        "delta = rewards[:, step] - values[:, step]",
        "losses/test_gae.py",
    ),
    mutation(
        "squared_error: minimum instead of maximum",
        "losses/squared_error.py",
        "torch.maximum(error, clipped)",
        "torch.minimum(error, clipped)",
        "losses/test_squared_error.py",
    ),
    mutation(
        "value_credit: a turn's reward before its last token",
        "rl/learner/value_credit.py",
        "torch.searchsorted(ordered, numbers, right=True)",
        "torch.searchsorted(ordered, numbers, right=False)",
        "rl/learner/test_value_credit.py",
    ),
    mutation(
        "value_credit: values trained at every token of a turn",
        "rl/learner/value_credit.py",
        "else advantages, returns, starts)",
        "else advantages, returns, exists)",
        "rl/learner/test_value_credit.py",
    ),
    mutation(
        "token_table: every rollout has the position of the next one",
        "rl/learner/token_table.py",
        "self._starts = lengths.cumsum(0) - lengths",
        "self._starts = lengths.cumsum(0) - lengths[0]",
        "rl/learner/test_token_table.py",
    ),
    mutation(
        "critic: unscored rollouts train",
        "rl/learner/critic.py",
        "table.exists & scored,",
        "table.exists,",
        "rl/learner/test_token_table.py",
    ),
    mutation(
        "critic: the penalty added to the reward",
        "rl/learner/critic.py",
        "rewards - lost[0] if lost else rewards",
        "rewards + lost[0] if lost else rewards",
        "rl/learner/test_token_table.py",
    ),
)
