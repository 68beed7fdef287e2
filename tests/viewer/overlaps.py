"""Texts of an open page that lie over each other, as far as both can be seen."""

from typing import Any

_FIND = """() => {
  const cut = ({ left, right, top, bottom }, node) => {
    let box = { left, right, top, bottom };
    for (let at = node.parentElement; at; at = at.parentElement) {
      const style = getComputedStyle(at);
      if (style.visibility === "hidden" || style.clipPath !== "none" || style.position === "sticky") return null;
      if (style.overflowX === "visible" && style.overflowY === "visible") continue;
      const edge = at.getBoundingClientRect();
      box = { left: Math.max(box.left, edge.left), right: Math.min(box.right, edge.right),
        top: Math.max(box.top, edge.top), bottom: Math.min(box.bottom, edge.bottom) };
    }
    return box;
  };
  const boxes = [];
  const walk = document.createTreeWalker(document.getElementById("main"), NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode;
    if (!node.textContent.trim() || !node.parentElement.checkVisibility()) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const line of range.getClientRects()) {
      const box = cut(line, node);
      if (box && box.right - box.left > 1 && box.bottom - box.top > 1) boxes.push({ node, ...box });
    }
  }
  boxes.sort((a, b) => a.top - b.top);
  const found = [];
  boxes.forEach((a, at) => {
    for (const b of boxes.slice(at + 1)) {
      if (b.top >= a.bottom) break;
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - b.top;
      // Lines of text touch by less than this, because their boxes are taller than their letters.
      if (a.node === b.node || across <= 1 || down <= 0.35 * (b.bottom - b.top)) continue;
      found.push(`${a.node.textContent} / ${b.node.textContent}`);
    }
  });
  return found;
}"""


def overlaps(page: Any) -> list[str]:
    """Return the pairs of texts that overlap."""
    found: list[str] = page.evaluate(_FIND)
    return found
