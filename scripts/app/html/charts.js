"use strict";
// From the figures' data to traces and layouts. Text that comes from records is escaped where it becomes a label,
// because Plotly reads a little HTML in labels.

const DATA = JSON.parse(document.getElementById("data").textContent);

const esc = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const coarse = matchMedia("(pointer: coarse)").matches;
const num = value => value == null ? "n/a" : String(Number(value.toPrecision(4)));

// A custom property as the browser resolves it, light or dark.
const probe = document.body.appendChild(Object.assign(document.createElement("i"), { hidden: true }));
const ink = name => {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
};
const faded = (hex, alpha) => {
  const [r, g, b] = [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16));
  return `rgba(${r},${g},${b},${alpha})`;
};

const look = (strategy, index) =>
  DATA.looks[Object.hasOwn(DATA.looks, strategy) ? strategy : DATA.cycle[index % DATA.cycle.length]];
const dash = variant => DATA.dashes[variant % DATA.dashes.length];

function measured(axis, value) {
  const range = value.low == null ? "" : ` (${num(value.low)} to ${num(value.high)})`;
  const n = value.n == null ? "" : `, n = ${value.n}`;
  return `${esc(axis.title)}: ${num(value.median)}${range}${n}`;
}

function axisOf(axis, extra) {
  return Object.assign({
    title: { text: wrapped(axis.title, 46), standoff: 8, font: { size: 12, color: ink("dim") } },
    type: axis.log ? "log" : "linear",
    rangemode: axis.zero ? "tozero" : "normal",
    gridcolor: ink("line"), linecolor: ink("line"), zeroline: false, ticks: "", automargin: true,
    tickfont: { size: 11, color: ink("dim") }, fixedrange: coarse,
  }, axis.log ? { dtick: "D2" } : {}, extra);
}

function layoutOf(height, parts) {
  return Object.assign({
    height, margin: { l: 52, r: 14, t: 10, b: 42 }, showlegend: false, hovermode: "closest", dragmode: "zoom",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: "inherit", color: ink("ink") },
    hoverlabel: {
      bgcolor: ink("panel"), bordercolor: ink("line"), align: "left", namelength: 0,
      font: { family: "inherit", size: 12, color: ink("ink") },
    },
  }, parts);
}

const whiskers = (values, color) => ({
  type: "data", symmetric: false, thickness: 1.2, width: 3, color, visible: values.some(v => v.low != null),
  array: values.map(v => v.high == null ? null : v.high - v.median),
  arrayminus: values.map(v => v.low == null ? null : v.median - v.low),
});

// Polygons between low and high, one for each stretch without a gap.
function band(curve) {
  const xs = [], ys = [];
  let start = 0;
  for (let i = 0; i <= curve.y.length; i++) {
    if (i < curve.y.length && curve.y[i].low != null) continue;
    if (i - start > 1) {
      for (let k = start; k < i; k++) { xs.push(curve.x[k]); ys.push(curve.y[k].low); }
      for (let k = i - 1; k >= start; k--) { xs.push(curve.x[k]); ys.push(curve.y[k].high); }
      xs.push(null); ys.push(null);
    }
    start = i + 1;
  }
  return { xs, ys };
}

const kinds = {
  curves(figure, shows) {
    const traces = [], legend = [];
    figure.curves.forEach((curve, index) => {
      const { color, symbol } = look(curve.strategy, index);
      const key = curve.label;
      if (!shows(curve.tags, null)) return;
      legend.push({ key, label: curve.label, color, symbol: figure.marks ? symbol : null, dash: dash(curve.variant) });
      if (!shows(curve.tags, key)) return;
      const few = figure.marks || curve.x.length === 1;
      if (!figure.marks) {
        const { xs, ys } = band(curve);
        if (xs.length) traces.push({
          type: "scatter", x: xs, y: ys, mode: "lines", line: { width: 0 }, fill: "toself",
          fillcolor: faded(color, 0.13), hoverinfo: "skip",
        });
      }
      traces.push({
        type: "scatter", mode: few ? "lines+markers" : "lines", x: curve.x, y: curve.y.map(v => v.median),
        line: { color, width: curve.strategy === "ring" ? 2.4 : 1.7, dash: dash(curve.variant) },
        marker: { color, symbol, size: 8, line: { width: 1.6, color } },
        error_y: figure.marks ? whiskers(curve.y, color) : undefined,
        hovertext: curve.y.map((v, i) =>
          `<b>${esc(curve.label)}</b><br>${esc(figure.x.title)}: ${num(curve.x[i])}<br>${measured(figure.y, v)}`),
        hoverinfo: "text",
      });
    });
    const xs = [...new Set(figure.curves.flatMap(curve => curve.x))];
    const ticks = figure.marks && xs.length <= 12 ? { tickvals: xs } : {};
    if (figure.x.whole && Math.max(...xs) - Math.min(...xs) < 8) ticks.dtick = 1;
    return { traces, legend, layout: layoutOf(330, { xaxis: axisOf(figure.x, ticks), yaxis: axisOf(figure.y) }) };
  },

  points(figure, shows) {
    const shown = figure.points.filter(point => shows(point.tags, point.strategy));
    const done = shown.filter(point => point.x.median != null && point.y.median != null);
    const failed = shown.filter(point => point.reason != null && point.x.median != null);
    const region = figure.points.some(point => point.reason != null && point.x.median != null);
    const traces = [], front = frontOf(done, figure.better);
    if (front.length > 1) traces.push({
      type: "scatter", mode: "lines", x: front.map(p => p.x.median), y: front.map(p => p.y.median),
      line: { color: ink("dim"), width: 1.4, dash: "dot" }, hoverinfo: "skip",
    });
    const groups = new Map();
    figure.points.filter(point => point.x.median != null)
      .forEach(point => groups.has(point.strategy) || groups.set(point.strategy, groups.size));
    for (const [strategy, index] of groups) {
      const mine = done.filter(point => point.strategy === strategy), { color, symbol } = look(strategy, index);
      if (mine.length) traces.push({
        type: "scatter", mode: "markers", x: mine.map(p => p.x.median), y: mine.map(p => p.y.median),
        error_x: whiskers(mine.map(p => p.x), faded(color, 0.6)), error_y: whiskers(mine.map(p => p.y), faded(color, 0.6)),
        marker: { color, symbol, size: 10, line: { color, width: 1.8 } }, hoverinfo: "text",
        hovertext: mine.map(p => `<b>${esc(p.label)}</b><br>${measured(figure.y, p.y)}<br>${measured(figure.x, p.x)}`
          + (front.includes(p) ? "<br>on the front" : "")),
      });
    }
    if (failed.length) traces.push({
      type: "scatter", mode: "markers", yaxis: "y2", x: failed.map(p => p.x.median), y: failed.map(() => 0.5),
      marker: { color: ink("bad"), symbol: "x-thin-open", size: 9, line: { width: 2.2 } }, hoverinfo: "text",
      hovertext: failed.map(p => `<b>${esc(p.label)}</b><br>no result: ${wrapped(p.reason)}<br>KV predicted (MiB): ${num(p.x.median)}`),
    });
    const layout = layoutOf(380, { xaxis: axisOf(figure.x, { anchor: region ? "y2" : "y" }), yaxis: axisOf(figure.y) });
    if (region) {
      layout.yaxis.domain = [0.17, 1];
      layout.yaxis2 = { domain: [0, 0.11], range: [0, 1], showticklabels: false, showgrid: false, zeroline: false, fixedrange: true };
      layout.shapes = [{ type: "rect", xref: "paper", yref: "paper", x0: 0, x1: 1, y0: 0, y1: 0.11, line: { width: 0 },
        fillcolor: ink("none"), layer: "below" }];
      layout.annotations = [{ text: "no result", xref: "paper", yref: "paper", x: 1, y: 0.115, xanchor: "right", yanchor: "bottom",
        showarrow: false, font: { size: 11, color: ink("dim") } }];
    }
    const present = new Set(figure.points.filter(point => shows(point.tags, null)).map(point => point.strategy));
    const legend = [...groups].filter(([strategy]) => present.has(strategy))
      .map(([strategy, index]) => ({ key: strategy, label: strategy, ...look(strategy, index) }));
    return { traces, legend, layout };
  },

  dots(figure, shows) {
    const rows = [...new Set(figure.dots.filter(dot => shows(dot.tags, null)).map(dot => dot.label))];
    const series = [...new Set(figure.dots.map(dot => dot.series))];
    const told = series.length > 1 && series.length <= 3;
    const traces = [];
    for (const dot of figure.dots) {
      if (!shows(dot.tags, dot.series)) continue;
      const at = series.indexOf(dot.series), { color, symbol } = look(dot.strategy, rows.indexOf(dot.label));
      const offset = series.length > 1 ? (at / (series.length - 1) - 0.5) * 0.5 : 0;
      traces.push({
        type: "scatter", mode: "markers", x: [dot.value.median], y: [rows.indexOf(dot.label) + offset],
        error_x: whiskers([dot.value], color), hoverinfo: "text",
        marker: { color, symbol: told ? (at ? "circle-open" : "circle") : symbol, size: 9, line: { color, width: 1.8 } },
        hovertext: [`<b>${esc(dot.label)}${dot.series ? ", " + esc(dot.series) : ""}</b><br>${measured(figure.x, dot.value)}`],
      });
    }
    const legend = told ? series.map((name, at) => ({ key: name, label: name, color: null, symbol: at ? "circle-open" : "circle" })) : [];
    const layout = layoutOf(64 + Math.max(2, rows.length) * (series.length > 4 ? 46 : 30), {
      xaxis: axisOf(figure.x),
      yaxis: axisOf({ title: "" }, { range: [rows.length - 0.4, -0.6], tickvals: rows.map((_, i) => i), ticktext: rows.map(esc),
        tickfont: { size: 12, color: ink("ink") }, fixedrange: true }),
    });
    if (figure.reference != null) layout.shapes = [{ type: "line", xref: "x", yref: "paper", x0: figure.reference,
      x1: figure.reference, y0: 0, y1: 1, line: { color: ink("dim"), width: 1, dash: "dot" }, layer: "below" }];
    return { traces, legend, layout };
  },

  grid(figure, shows) {
    if (!shows(figure.tags, null)) return { traces: [], legend: [], layout: null };
    const [xKnob, yKnob] = figure.knobs;
    const xs = figure.x_values.map((_, i) => i).filter(i => shows({ [xKnob]: figure.x_values[i] }, null));
    const ys = figure.y_values.map((_, i) => i).filter(i => shows({ [yKnob]: figure.y_values[i] }, null));
    const pick = (matrix, map) => ys.map(y => xs.map(x => map(matrix[y][x], x, y)));
    const where = (x, y) => `${esc(figure.x.title)} ${esc(figure.x_values[x])}, ${esc(figure.y.title)} ${esc(figure.y_values[y])}`;
    const place = { type: "heatmap", x: xs.map((_, i) => i), y: ys.map((_, i) => i), xgap: 3, ygap: 3, showscale: false, hoverinfo: "text" };
    const shade = value => figure.log ? Math.log10(value) : value, [low, high] = figure.span.map(shade);
    const traces = [
      { ...place, z: pick(figure.cells, v => v == null ? null : shade(v)), zmin: low, zmax: high > low ? high : low + 1,
        colorscale: [[0, ink("low")], [1, ink("high")]], text: pick(figure.cells, v => v == null ? "" : num(v)),
        texttemplate: xs.length * ys.length <= 120 ? "%{text}" : undefined,
        hoverongaps: false, hovertext: pick(figure.cells, (v, x, y) => `<b>${where(x, y)}</b><br>${num(v)} ${esc(figure.unit)}`) },
      { ...place, z: pick(figure.notes, note => note ? 1 : null), zmin: 0, zmax: 1, colorscale: [[0, ink("none")], [1, ink("none")]],
        text: pick(figure.notes, note => note ? "×" : ""), texttemplate: "%{text}", textfont: { color: ink("bad"), size: 18 },
        hoverongaps: false, hovertext: pick(figure.notes, (note, x, y) => `<b>${where(x, y)}</b><br>no result: ${wrapped(note)}`) },
    ];
    const ticks = (indices, values) => ({ tickvals: indices.map((_, i) => i), ticktext: indices.map(i => esc(values[i])), showgrid: false, fixedrange: true });
    const layout = layoutOf(84 + Math.max(46, Math.min(46 * ys.length, 420)), {
      xaxis: axisOf(figure.x, ticks(xs, figure.x_values)), yaxis: axisOf(figure.y, ticks(ys, figure.y_values)),
    });
    return { traces: xs.length && ys.length ? traces : [], legend: [], layout };
  },

  map(figure, shows) {
    if (!shows(figure.tags, null)) return { traces: [], legend: [], layout: null };
    const colors = figure.classes.map(([, color], index) => index ? color : ink("unseen")), count = colors.length;
    const scale = colors.flatMap((color, i) => [[i / count, color], [(i + 1) / count, color]]);
    const rows = figure.y_values.map((_, i) => i);
    const traces = [{
      type: "heatmap", x: figure.x_values, y: rows, z: figure.cells, zmin: -0.5, zmax: count - 0.5, colorscale: scale, ygap: 2,
      showscale: false, hoverinfo: "text",
      hovertext: figure.cells.map((cells, y) => cells.map((cell, x) =>
        `layer ${esc(figure.y_values[y])}<br>age ${figure.x_values[x]}: ${esc(figure.classes[cell][0])}`)),
    }];
    const legend = figure.classes.map(([label], i) => ({ key: null, label, color: colors[i] }));
    const step = Math.ceil(rows.length / 24);
    const layout = layoutOf(70 + Math.max(120, Math.min(22 * rows.length, 440)), {
      xaxis: axisOf(figure.x, { autorange: "reversed", showgrid: false }),
      yaxis: axisOf(figure.y, { autorange: "reversed", showgrid: false, fixedrange: true, tickvals: rows.filter(i => i % step === 0),
        ticktext: figure.y_values.filter((_, i) => i % step === 0).map(esc) }),
    });
    return { traces, legend, layout };
  },
};

// What no other point beats, by x; of equal points the first.
function frontOf(points, better) {
  const sign = better.map(way => way === "low" ? 1 : -1);
  const cost = point => [sign[0] * point.x.median, sign[1] * point.y.median];
  const ordered = [...points].sort((a, b) => cost(a)[0] - cost(b)[0] || cost(a)[1] - cost(b)[1]);
  let best = Infinity;
  const front = ordered.filter(point => cost(point)[1] < best && ((best = cost(point)[1]), true));
  return front.sort((a, b) => a.x.median - b.x.median);
}

// Long text in lines that fit a hover label or an axis.
function wrapped(text, width = 56) {
  const lines = [""];
  for (const word of String(text).slice(0, 400).split(" ")) {
    if ((lines.at(-1) + word).length > width) lines.push("");
    lines[lines.length - 1] += (lines.at(-1) ? " " : "") + word;
  }
  return lines.map(esc).join("<br>");
}
