// The page around the charts: theme, filters, tables.

const off = new Map();  // knob -> values that are filtered out
const passes = tags => Object.entries(tags).every(([knob, value]) => !off.get(knob)?.has(value));

class Chart {
  constructor(figure, element) {
    this.figure = figure;
    this.plot = element;
    this.legend = element.previousElementSibling;
    this.hidden = new Set();  // legend entries that were switched off in this chart
    this.near = false;
    this.stale = true;
  }

  render() {
    this.stale = true;
    if (!this.near) return;
    this.stale = false;
    const shows = (tags, key) => passes(tags) && !(key !== null && this.hidden.has(key));
    const { traces, legend, layout } = kinds[this.figure.kind](this.figure, shows);
    const empty = traces.length === 0;
    const drawn = layout ?? layoutOf(160, {});
    if (empty) {
      drawn.xaxis = { visible: false };
      drawn.yaxis = { visible: false };
      drawn.annotations = [{ text: "nothing passes the filters", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5,
        font: { color: ink("dim") } }];
    }
    Plotly.react(this.plot, traces, drawn, {
      responsive: true, displaylogo: false, displayModeBar: false,
    });
    this.plot.dataset.marks = traces.reduce((sum, trace) => sum + (trace.hoverinfo === "skip" ? 0 : 1), 0);
    this.showLegend(legend);
  }

  showLegend(entries) {
    this.legend.replaceChildren(...entries.map(entry => {
      const node = document.createElement(entry.key === null ? "span" : "button");
      if (entry.key === null) {
        node.append(Object.assign(document.createElement("i"), { style: `background:${entry.color}` }));
      } else {
        node.type = "button";
        node.setAttribute("aria-pressed", String(!this.hidden.has(entry.key)));
        node.addEventListener("click", () => {
          this.hidden.has(entry.key) ? this.hidden.delete(entry.key) : this.hidden.add(entry.key);
          this.render();
        });
        node.append(sample(entry));
      }
      node.append(entry.label);
      return node;
    }));
  }
}

// A short piece of the line or the marker, as SVG.
function sample({ color, symbol, dash: style }) {
  const make = (name, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    Object.entries(attributes).forEach(([key, value]) => node.setAttribute(key, value));
    return node;
  };
  const paint = color ?? "currentColor", open = symbol?.endsWith("-open");
  const svg = make("svg", { width: style ? 26 : 12, height: 12, "aria-hidden": "true" });
  const mid = style ? 13 : 6;
  if (style) {
    const dashes = { solid: "", dash: "6 3", dot: "2 3", dashdot: "6 3 2 3", longdash: "10 4" }[style];
    svg.append(make("line", { x1: 0, x2: 26, y1: 6, y2: 6, stroke: paint, "stroke-width": 2, "stroke-dasharray": dashes }));
  }
  if (symbol) {
    const shape = symbol.replace("-open", "");
    const dress = { fill: open ? "none" : paint, stroke: paint, "stroke-width": 1.6 };
    const polygons = {
      square: [[-4, -4], [4, -4], [4, 4], [-4, 4]], diamond: [[0, -5], [5, 0], [0, 5], [-5, 0]],
      "triangle-up": [[0, -5], [5, 4], [-5, 4]], "triangle-down": [[0, 5], [5, -4], [-5, -4]],
      hexagon: [[0, -5], [4.3, -2.5], [4.3, 2.5], [0, 5], [-4.3, 2.5], [-4.3, -2.5]],
      star: [[0, -5], [1.4, -1.6], [5, -1.6], [2.2, 0.8], [3, 4.6], [0, 2.4], [-3, 4.6], [-2.2, 0.8], [-5, -1.6], [-1.4, -1.6]],
    };
    svg.append(shape in polygons
      ? make("polygon", { points: polygons[shape].map(([x, y]) => `${mid + x},${6 + y}`).join(" "), ...dress })
      : make("circle", { cx: mid, cy: 6, r: 4.2, ...dress }));
  }
  return svg;
}

const plots = [...document.querySelectorAll("[data-figure]")];
const byName = new Map(DATA.figures.map(figure => [figure.name, figure]));
const chartOf = new Map(plots.map(element => [element, new Chart(byName.get(element.dataset.figure), element)]));

// Charts are drawn when they come near the window: a long report opens as fast as a short one.
const watcher = new IntersectionObserver(entries => entries.forEach(entry => {
  const chart = chartOf.get(entry.target);
  chart.near ||= entry.isIntersecting;
  if (entry.isIntersecting && chart.stale) chart.render();
}), { rootMargin: "800px" });
plots.forEach(element => watcher.observe(element));
function drawAll() {
  chartOf.forEach(chart => {
    chart.near = true;
    if (chart.stale) chart.render();
  });
}
addEventListener("beforeprint", drawAll);
const redraw = () => chartOf.forEach(chart => chart.render());

// -- theme
const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)");
const remembered = { get: () => { try { return localStorage.getItem("ringkv-theme"); } catch { return null; } },
  set: theme => { try { localStorage.setItem("ringkv-theme", theme); } catch { /* a file may have no storage */ } } };
if (remembered.get()) root.dataset.theme = remembered.get();
document.getElementById("theme").addEventListener("click", () => {
  const dark = (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  root.dataset.theme = dark ? "light" : "dark";
  remembered.set(root.dataset.theme);
  redraw();
});
system.addEventListener("change", redraw);

// -- filters
document.querySelectorAll(".swatch").forEach((node, index) => { node.style.background = look(node.dataset.strategy, index).color; });
const boxes = [...document.querySelectorAll(".filters input")];
function filter() {
  off.clear();
  boxes.filter(box => !box.checked).forEach(box => {
    off.set(box.dataset.knob, (off.get(box.dataset.knob) ?? new Set()).add(box.value));
  });
  const count = boxes.filter(box => !box.checked).length;
  document.getElementById("off").textContent = count ? `${count} off` : "";
  document.querySelectorAll("[data-tags]").forEach(node => { node.hidden = !passes(JSON.parse(node.dataset.tags)); });
  redraw();
}
boxes.forEach(box => box.addEventListener("change", filter));
document.getElementById("reset").addEventListener("click", () => { boxes.forEach(box => { box.checked = true; }); filter(); });
const panel = document.querySelector(".filters");
if (!boxes.length) panel.hidden = true;
if (matchMedia("(max-width: 62rem)").matches) panel.open = false;

// -- tables
document.querySelectorAll("th button").forEach(button => button.addEventListener("click", () => {
  const head = button.parentElement, body = head.closest("table").tBodies[0], place = head.cellIndex;
  const way = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  head.parentElement.querySelectorAll("th").forEach(each => each.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
  const value = row => row.cells[place].dataset.sort ?? row.cells[place].textContent;
  const order = (a, b) => (a - b) || a.localeCompare(b, "en", { numeric: true });  // NaN, of text, goes on to text
  body.append(...[...body.rows].sort((a, b) => way * order(value(a), value(b))));
}));
document.querySelectorAll("[data-copy]").forEach(button => button.addEventListener("click", async () => {
  const text = button.dataset.copy;
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // a page that was opened as a file may have no clipboard
    const area = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "copied";
  setTimeout(() => { button.textContent = "copy"; }, 1500);
}));

// -- where one is
const links = new Map([...document.querySelectorAll("nav a")].map(link => [link.hash.slice(1), link]));
const reading = new IntersectionObserver(entries => entries.forEach(entry => {
  if (!entry.isIntersecting) return;
  links.forEach(link => link.classList.remove("here"));
  links.get(entry.target.id)?.classList.add("here");
}), { rootMargin: "-10% 0px -80% 0px" });
document.querySelectorAll("section").forEach(section => reading.observe(section));
