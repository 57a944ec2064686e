// Create elements without parsing HTML, so that no text of a rollout can become code.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, props = {}, ...children) {
  return filled(document.createElement(tag), props, children);
}

export function svg(tag, props = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), props, children);
}

function filled(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") setStyle(element, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

function setStyle(element, style) {
  for (const [name, value] of Object.entries(style)) element.style.setProperty(name, value);
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e5)) return value.toExponential(1);
  // With `digits` decimal places, a value below the last place would be shown as 0.
  const shown =
    size < 10 ** -digits
      ? { maximumSignificantDigits: 2 }
      : { maximumFractionDigits: size >= 100 ? 0 : digits };
  return value.toLocaleString("en", shown);
}

export function signed(value, digits = 2) {
  if (value === null || value === undefined) return "–";
  return (value > 0 ? "+" : value < 0 ? "−" : "") + number(Math.abs(value), digits);
}

export function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}

// Return the name of a training step or of an evaluated version. The step of evaluate.py's rollouts is -1.
export function stepLabel({ source, step }) {
  if (step < 0) return "evaluation";
  return `${source === "evaluation" ? "version" : "step"} ${number(step)}`;
}
