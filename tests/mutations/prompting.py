"""Mistakes in the search for a prompt: who is better, what is asked again, where it ends."""

from tests.mutations.mutation import mutation

PROMPTING = (
    mutation(
        "prompt_player: one answer for all prompts",
        "rl/prompts/prompt_player.py",
        'QUESTION = ("prompt", "split", "env", "example")',
        'QUESTION = ("split", "env", "example")',
        "rl/prompts/test_optimize.py::test_a_search_that_was_interrupted_and_killed_ends_as_if_nobody_had_stopped_it",
    ),
    mutation(
        "search: a prompt that is no worse is a candidate",
        "rl/prompts/search.py",
        "if a is not None and b is not None) > 0",
        "if a is not None and b is not None) >= 0",
        "rl/prompts/test_search.py",
    ),
    mutation(
        "search: a prompt is compared where its parent was not scored",
        "rl/prompts/search.py",
        "return sum(a - b for b, a in pairs if a is not None and b is not None) > 0",
        "return sum((a or 0) - (b or 0) for b, a in pairs) > 0",
        "rl/prompts/test_search.py",
    ),
    mutation(
        "search: the last round may exceed the budget",
        "rl/prompts/search.py",
        "gepa_state.total_num_evals + self._round_calls > settings.max_calls",
        "gepa_state.total_num_evals > settings.max_calls",
        "rl/prompts/test_optimize.py::test_the_budget_is_never_exceeded_whatever_it_is",
    ),
    mutation(
        "search: what could not be scored counts",
        "rl/prompts/search.py",
        "[None if (prompt, i) in self._unscored else scores[i] for i in sorted(scores)]",
        "[scores[i] for i in sorted(scores)]",
        "rl/prompts/test_optimize.py::test_what_the_environment_cannot_score_is_no_prompts_fault",
    ),
    mutation(
        "teacher: it may say nothing for ever",
        "rl/prompts/teacher.py",
        "if self._num_empty == _MOST_EMPTY:",
        "if False:",
        "rl/prompts/test_optimize.py::test_a_teacher_that_says_nothing_ends_the_search_before_the_budget_does",
    ),
    mutation(
        "outputs: the last of the best replaces the first",
        "rl/prompts/outputs.py",
        "max(range(len(self.prompts)), key=lambda i: self.means[i])",
        "max(reversed(range(len(self.prompts))), key=lambda i: self.means[i])",
        "rl/prompts/test_outputs.py",
    ),
    mutation(
        "closing_lines: the prompt that was begun with goes into the commands",
        "rl/prompts/closing_lines.py",
        'named in (*_POLICY, "adapter_path") and key != "env.system_prompt"',
        'named in (*_POLICY, "adapter_path", "max_calls")',
        "rl/prompts/test_closing_lines.py",
    ),
)
