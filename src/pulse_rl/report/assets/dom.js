// Elements, made without ever parsing text as HTML: what the data says is shown, never run.

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function shape(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

function section(title, lead) {
  const grid = element("div", { class: "grid" });
  const node = element("section", {}, element("h2", {}, title));
  if (lead) node.append(element("p", { class: "lead" }, lead));
  node.append(grid);
  document.getElementById("sections").append(node);
  return grid;
}

// A figure with its title, a sentence of reading help, a drawing that follows the width, and its numbers as a table.
// `draw(plot, width)` fills the plot; `table` is {columns, rows} or a function that gives it when it is opened.
function figure(host, { title, note, table, wide }, draw) {
  const heading = element("h3", { id: freshId() }, title);
  const plot = element("div", { class: "plot" });
  const node = element("figure", { class: wide ? "wide" : null, "aria-labelledby": heading.id }, heading);
  if (note) node.append(element("p", { class: "note" }, note));
  node.append(plot);
  if (table) node.append(tableOnDemand(table, title));
  host.append(node);
  let width = 0;
  const redraw = () => {
    width = plot.clientWidth;
    plot.replaceChildren();
    if (width > 0) draw(plot, width);
  };
  new ResizeObserver(() => {
    if (plot.clientWidth !== width) redraw();
  }).observe(plot);
  redraw();
  return redraw;
}

let ids = 0;
const freshId = () => `id-${++ids}`;

function tableOnDemand(table, title) {
  const box = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Table: ${title}` });
  const details = element("details", {}, element("summary", {}, "Show the numbers"), box);
  details.addEventListener("toggle", () => {
    if (details.open) box.replaceChildren(htmlTable(typeof table === "function" ? table() : table));
  });
  return details;
}

function htmlTable({ columns, rows }) {
  const head = element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name)));
  const body = rows.map(([first, ...rest]) =>
    element("tr", {}, element("th", { scope: "row" }, first), ...rest.map((cell) => element("td", {}, cell))),
  );
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
}

// At most `most` of the rows, evenly spread, the first and the last among them.
function spread(rows, most = 40) {
  if (rows.length <= most) return rows;
  return Array.from({ length: most }, (_, i) => rows[Math.round((i * (rows.length - 1)) / (most - 1))]);
}
