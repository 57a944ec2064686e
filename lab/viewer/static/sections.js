// The rollouts to compare with an open one: sections of {run, title, rows, step}, or a sentence
// that explains why there are no sections.

import { stepLabel } from "./dom.js";

export const SECTIONS = {
  group(tables, run, row) {
    const table = tables[run];
    const group = table.groups[table.groupOf[row]];
    return [{ run, title: stepLabel(group), rows: range(group), step: group.step }];
  },
  versions(tables, run, row) {
    const table = tables[run];
    const { source } = table.groups[table.groupOf[row]];
    const groups = groupsOf(table, table.columns.question[row]).filter(
      (group) => group.source === source,
    );
    if (groups.length < 2) {
      return "This question was asked once in this run. Every evaluation repeats the held-out questions: open one under Evaluations.";
    }
    return groups.map((group) => ({
      run,
      title: stepLabel(group),
      rows: range(group),
      step: group.step,
    }));
  },
  runs(tables, run, row) {
    if (tables.length < 2)
      return "Only one run is open. To see the same question in other runs, name their folders too: python view.py outputs/one outputs/other";
    const table = tables[run];
    const here = table.groups[table.groupOf[row]];
    const sections = [];
    tables.forEach((other, i) => {
      const groups = other.facts
        ? groupsOf(other, table.columns.question[row]).filter((g) => g.source === here.source)
        : [];
      if (!groups.length) return;
      const nearest = groups.reduce((a, b) =>
        Math.abs(b.step - here.step) < Math.abs(a.step - here.step) ? b : a,
      );
      sections.push({
        run: i,
        title: `${other.facts.name} · ${stepLabel(nearest)}`,
        rows: range(nearest),
        step: nearest.step,
        mine: i === run,
      });
    });
    if (sections.length < 2)
      return "No other run was asked this question. Runs of one environment share held-out questions: open one under Evaluations.";
    return sections.sort((a, b) => Number(b.mine) - Number(a.mine));
  },
};

function groupsOf(table, question) {
  const groups = table.groups.filter((group) => table.columns.question[group.start] === question);
  return groups.sort((a, b) => a.step - b.step);
}

function range(group) {
  return Array.from({ length: group.end - group.start }, (_, i) => group.start + i);
}
