// The source of the rollouts: the program that serves this page or, in an export, the page itself.

export async function openData() {
  const embedded = document.getElementById("embedded");
  return embedded ? embeddedData(await unpacked(embedded.textContent)) : servedData();
}

async function servedData() {
  const ask = async (path, options) => {
    const answer = await fetch(path, options);
    if (!answer.ok) throw new Error((await answer.text()) || answer.statusText);
    return answer;
  };
  const json = async (path) => (await ask(path)).json();
  return {
    live: true,
    runs: await json("runs"),
    table: (run, start, generation) =>
      json(`table?run=${run}&start=${start}&generation=${generation}`),
    rollouts: (run, numbers) => json(`rollouts?run=${run}&n=${numbers.join(",")}`),
    tokens: (run, number) => json(`tokens?run=${run}&n=${number}`),
    search: (run, text) => json(`search?run=${run}&q=${encodeURIComponent(text)}`),
    exported: async (chosen) =>
      (await ask("export", { method: "POST", body: JSON.stringify(chosen) })).blob(),
  };
}

function embeddedData(content) {
  const texts = new Map();
  const text = (run, number) => {
    const key = `${run}.${number}`;
    if (!texts.has(key))
      texts.set(key, spoken(content.runs[run].rollouts[number].messages).toLowerCase());
    return texts.get(key);
  };
  return {
    live: false,
    runs: content.runs.map((run) => run.table.name),
    note: content.note,
    table: async (run) => content.runs[run].table,
    rollouts: async (run, numbers) => numbers.map((n) => content.runs[run].rollouts[n]),
    tokens: async (run, number) => content.runs[run].tokens[number],
    search: async (run, wanted) =>
      [...content.runs[run].rollouts.keys()].filter((n) =>
        text(run, n).includes(wanted.toLowerCase()),
      ),
  };
}

async function unpacked(base64) {
  const bytes = Uint8Array.from(atob(base64.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

function spoken(value) {
  if (typeof value === "string") return value;
  if (Array.isArray(value)) return value.map(spoken).join("\n");
  if (value && typeof value === "object") return Object.values(value).map(spoken).join("\n");
  return value === null || value === undefined ? "" : String(value);
}
