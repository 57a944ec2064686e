// Choose a range of a picture by dragging, or one value by a click. A click on the chosen value, or a
// double click, removes the choice.

export function brushed(element, { place, chosen, choose }) {
  let began = null;
  const at = (event) => {
    const box = element.getBoundingClientRect();
    return place(Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)));
  };
  element.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    element.setPointerCapture(event.pointerId);
    began = { place: at(event), x: event.clientX, before: chosen() };
    event.preventDefault();
  });
  element.addEventListener("pointermove", (event) => {
    if (began && Math.abs(event.clientX - began.x) > 3) choose(between(began.place, at(event)));
  });
  element.addEventListener("pointerup", (event) => {
    if (!began) return;
    const only = between(began.place, began.place);
    if (Math.abs(event.clientX - began.x) <= 3) choose(same(began.before, only) ? null : only);
    began = null;
  });
  element.addEventListener("dblclick", () => choose(null));
}

function between(a, b) {
  return [Math.min(a[0], b[0]), Math.max(a[1], b[1])];
}

function same(a, b) {
  return a !== null && a[0] === b[0] && a[1] === b[1];
}
