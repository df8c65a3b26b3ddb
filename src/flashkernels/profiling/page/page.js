document.querySelectorAll("th button").forEach(button => button.addEventListener("click", () => {
  const head = button.closest("th"), body = head.closest("table").tBodies[0];
  const column = head.cellIndex, up = head.getAttribute("aria-sort") !== "ascending";
  const value = row => { const text = row.cells[column].textContent, number = parseFloat(text); return /^[+-]?[\d.]/.test(text) ? number : text; };
  const empty = v => v === "-" || v === "";
  const order = (a, b) => empty(a) || empty(b) ? empty(a) - empty(b)
    : (up ? 1 : -1) * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true }));
  body.append(...[...body.rows].sort((a, b) => order(value(a), value(b))));
  head.parentNode.querySelectorAll("th").forEach(other => other.setAttribute("aria-sort", other !== head ? "none" : up ? "ascending" : "descending"));
}));

document.querySelectorAll("[data-show]").forEach(button => button.addEventListener("click", () => {
  const shown = button.getAttribute("aria-pressed") === "true", figure = button.closest("figure");
  button.setAttribute("aria-pressed", String(!shown));
  figure.querySelectorAll("[data-group]").forEach(mark => {
    if (mark.dataset.group === button.dataset.show) mark.classList.toggle("hidden", shown);
  });
}));
const tip = document.getElementById("tip");
const hide = () => { tip.hidden = true; };
document.querySelectorAll("[data-tip]").forEach(mark => {
  mark.querySelector("title")?.remove();  // the browser's own would come on top
  const show = event => {
    tip.textContent = mark.dataset.tip;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - box.width - 4)) + "px";
    tip.style.top = (event.clientY + 16 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 16) + "px";
  };
  mark.addEventListener("pointerenter", show);
  mark.addEventListener("pointermove", show);
  mark.addEventListener("pointerleave", hide);
});
addEventListener("scroll", hide, { passive: true });
