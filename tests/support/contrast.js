// Return the texts of the page whose contrast (WCAG 2.1) with their background is below 4.5.
() => {
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => below.map((value, i) => top[i] * top[3] + value * (1 - top[3]));
  const linear = (value) =>
    value <= 10.31475 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const low = {};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode()); ) {
    const element = node.parentElement;
    if (!node.data.trim() || !element.checkVisibility({ visibilityProperty: true })) continue;
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const background = rgba(getComputedStyle(at).backgroundColor);
      layers.unshift(background);
      if (background[3] === 1) break;
    }
    const below = layers.reduce((back, layer) => over(layer, back), [255, 255, 255]);
    const [dark, bright] = [below, over(rgba(getComputedStyle(element).color), below)]
      .map(light)
      .sort((a, b) => a - b);
    const contrast = (bright + 0.05) / (dark + 0.05);
    if (contrast < 4.5) low[`${element.className}: ${node.data.trim()}`] = contrast;
  }
  return low;
}
