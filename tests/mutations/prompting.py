"""Mistakes in the search for a prompt: comparisons and the budget."""

from tests.mutations.mutation import mutation

PROMPTING = (
    mutation(
        "search: an equal prompt becomes a candidate",
        "lab/prompts/search.py",
        "if a is not None and b is not None) > 0",
        "if a is not None and b is not None) >= 0",
        "lab/prompts/test_search.py",
    ),
    mutation(
        "search: compares with a parent that has no score",
        "lab/prompts/search.py",
        "return sum(a - b for b, a in pairs if a is not None and b is not None) > 0",
        "return sum((a or 0) - (b or 0) for b, a in pairs) > 0",
        "lab/prompts/test_search.py",
    ),
    mutation(
        "search: the last round may exceed the budget",
        "lab/prompts/search.py",
        "self.player.progress.done + self._round_calls > settings.max_calls",
        "self.player.progress.done > settings.max_calls",
        "lab/prompts/test_optimize.py::test_the_budget_is_never_exceeded_whatever_it_is",
    ),
    mutation(
        "search: counts rollouts without a score",
        "lab/prompts/search.py",
        "[None if (prompt, i) in self._unscored else scores[i] for i in sorted(scores)]",
        "[scores[i] for i in sorted(scores)]",
        "lab/prompts/test_optimize.py::test_what_the_environment_cannot_score_is_no_prompts_fault",
    ),
    mutation(
        "teacher: empty answers have no limit",
        "lab/prompts/teacher.py",
        "if self._num_empty == _MOST_EMPTY:",
        "if False:",
        "lab/prompts/test_optimize.py::test_a_teacher_that_says_nothing_ends_the_search_before_the_budget_does",
    ),
    mutation(
        "outputs: a later equal candidate replaces the best",
        "lab/prompts/outputs.py",
        "max(range(len(self.prompts)), key=lambda i: self.means[i])",
        "max(reversed(range(len(self.prompts))), key=lambda i: self.means[i])",
        "lab/prompts/test_outputs.py",
    ),
    mutation(
        "closing_lines: the commands name the first prompt",
        "lab/prompts/closing_lines.py",
        'in _POLICY and key != "env.system_prompt"',
        'in (*_POLICY, "max_calls")',
        "lab/prompts/test_closing_lines.py",
    ),
)
