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
        "lab/prompts/test_optimize.py::test_no_search_exceeds_its_budget",
    ),
    mutation(
        "search: counts rollouts without a score",
        "lab/prompts/search.py",
        "[None if (prompt, i) in self._unscored else scores[i] for i in sorted(scores)]",
        "[scores[i] for i in sorted(scores)]",
        "lab/prompts/test_optimize.py::test_unscored_rollouts_change_no_score",
    ),
    mutation(
        "teacher: empty answers have no limit",
        "lab/prompts/teacher.py",
        "if self._num_empty == _MOST_EMPTY:",
        "if False:",
        "lab/prompts/test_optimize.py::test_four_empty_answers_of_the_teacher_end_the_search",
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
