// Makes elements. Data reaches the page only as text nodes and attributes: none of it is ever read as HTML.

const SVG_SPACE = "http://www.w3.org/2000/svg";

/** Make an HTML element. Attributes that are null, undefined or false are left out; "onX" are listeners. */
export function h(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Make an SVG element in the same way. */
export function svg(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG_SPACE, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Write a number with so many decimals, and a dash for one that is undefined. */
export function num(value, decimals = 2) {
  return typeof value === "number" ? value.toFixed(decimals) : "–";
}

/** Write a count with separators. */
export function count(value) {
  return Math.round(value).toLocaleString("en-US");
}

/** Write a number of tokens in few characters. */
export function short(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  return value >= 1e4 ? `${(value / 1e3).toFixed(0)}k` : value >= 1e3 ? `${(value / 1e3).toFixed(1)}k` : String(value);
}

/** "1 turn", "2 turns". */
export function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** Make a section with a heading that a screen reader can jump to. */
export function section(title, attributes, ...children) {
  return h("section", { ...attributes, "aria-label": title }, h("h3", {}, title), children);
}

/** Announce a text to screen readers. */
export function announce(text) {
  document.getElementById("live").textContent = text;
}
