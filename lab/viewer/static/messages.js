// Turn a message of any shape into elements: thoughts, text and tool calls.

import { h } from "./dom.js";

const LONG = { tool: 700, system: 160 }; // longer messages are folded at first

export function said(message) {
  if (!message || typeof message !== "object") return [h("p", { class: "text" }, asText(message))];
  const parts = [];
  const folds = message.role === "tool" || message.role === "system";
  if (message.reasoning_content)
    parts.push(h("p", { class: "text thinking" }, asText(message.reasoning_content)));
  if (message.content) {
    const text = asText(message.content);
    if (folds) {
      const firstLine = text.trim().split("\n")[0].slice(0, 160);
      parts.push(
        folded(
          message.role === "tool" ? "answer" : "instructions",
          firstLine,
          text,
          text.length <= LONG[message.role],
        ),
      );
    } else parts.push(...withThoughts(text));
  }
  const calls = message.tool_calls ?? [];
  for (const call of Array.isArray(calls) ? calls : [calls]) parts.push(calling(call));
  if (!parts.length) parts.push(h("p", { class: "text nothing" }, "(nothing)"));
  return parts;
}

function withThoughts(text) {
  const match = /^\s*<think>([\s\S]*?)(<\/think>|$)/.exec(text);
  if (!match) return [h("p", { class: "text" }, text)];
  const rest = text.slice(match[0].length).trim();
  return [
    h("p", { class: "text thinking" }, match[1].trim()),
    rest ? h("p", { class: "text" }, rest) : null,
  ].filter(Boolean);
}

function folded(name, summary, text, open) {
  return h(
    "details",
    { class: "fold", open },
    h("summary", {}, h("b", {}, name), h("span", {}, summary)),
    h("p", { class: "text" }, text),
  );
}

function calling(call) {
  const wanted = call?.function ?? {};
  const given =
    typeof wanted.arguments === "string" ? wanted.arguments : asText(wanted.arguments ?? call);
  const short =
    typeof wanted.arguments === "object" && wanted.arguments !== null
      ? Object.entries(wanted.arguments)
          .map(([k, v]) => `${k}=${JSON.stringify(v)}`)
          .join(", ")
      : given;
  const summary = h("summary", {}, h("b", {}, wanted.name || "call"), h("code", {}, `(${short})`));
  const error = call?.error ? h("p", { class: "error" }, asText(call.error)) : null;
  const whole =
    typeof wanted.arguments === "object" ? JSON.stringify(wanted.arguments, null, 2) : given;
  return h(
    "details",
    { class: "fold call", open: Boolean(error) },
    summary,
    h("pre", {}, whole),
    error,
  );
}

function asText(value) {
  return typeof value === "string"
    ? value
    : value === undefined
      ? ""
      : JSON.stringify(value, null, 1);
}

// Return the text of all messages from the policy's first message on.
export function answerText(line) {
  const from = line.messages.findIndex((message) => message?.role === "assistant");
  if (from < 0) return "";
  return line.messages
    .slice(from)
    .map((message) => {
      if (message?.role !== "assistant")
        return `‹${message?.role ?? "?"}› ${asText(message?.content ?? message)}`;
      const calls = [message.tool_calls ?? []]
        .flat()
        .map(
          (call) =>
            `${call?.function?.name ?? "call"}(${compact(call?.function?.arguments ?? call)})`,
        );
      return [message.reasoning_content, message.content, ...calls]
        .filter(Boolean)
        .map(asText)
        .join("\n");
    })
    .join("\n");
}

function compact(value) {
  return typeof value === "string"
    ? value
    : Object.entries(value ?? {})
        .map(([k, v]) => `${k}=${JSON.stringify(v)}`)
        .join(", ");
}
