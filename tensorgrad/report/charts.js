// Draws the charts of a page as SVG; one axis, one zoom and one cursor hold for all of them.
//
// Drag over a chart to zoom; a double click, Escape or the button shows the whole range again.
// On a chart that has the focus, arrows move the cursor, and + and - zoom around it.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const LEFT = 62, RIGHT = 14, TOP = 10, BOTTOM = 26; // margins of a plot, in pixels
  const state = { axis: "step", range: null, cursor: null }; // in units of the axis
  const views = [], reset = document.getElementById("reset");

  function make(parent, name, attributes = {}, text = "") {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.textContent = text;
    return parent.appendChild(node);
  }

  function places(curve) { // null where the run has no such axis
    const run = data.runs[curve.run], axis = state.axis;
    if (axis === "step") return curve.steps;
    curve.places ??= {};
    if (run[axis]) curve.places[axis] ??= along(curve.steps, run.step, run[axis], data.units[axis][1]);
    return curve.places[axis] ?? null;
  }

  function along(steps, at, values, size) { // straight lines between the known points
    let i = 1;
    return steps.map((step) => {
      while (i < at.length - 1 && at[i] < step) i++;
      const part = (step - at[i - 1]) / (at[i] - at[i - 1]);
      return (values[i - 1] + part * (values[i] - values[i - 1])) / (size ?? 1);
    });
  }

  function shown(view) { // the curves that are drawn, with their places
    return view.curves.filter((curve) => !curve.hidden && places(curve))
      .map((curve) => ({ curve, x: places(curve), y: curve.values }));
  }

  function wholeRange() {
    const all = views.flatMap(shown);
    const low = Math.min(...all.map(({ x }) => x[0])), high = Math.max(...all.map(({ x }) => x.at(-1)));
    return low < high ? [low, high] : low === high ? [low - 1, high + 1] : [0, 1];
  }

  function firstFrom(x, value) { // the number of the first place that is not below the value
    const found = x.findIndex((place) => place >= value);
    return found < 0 ? x.length : found;
  }

  const canDraw = (view, y) => typeof y === "number" && !(view.log && y <= 0);

  function ticks(low, high, count) {
    const small = 10 ** Math.floor(Math.log10((high - low) / count));
    const step = small * [1, 2, 5, 10].find((factor) => (high - low) / (small * factor) <= count || factor === 10);
    const first = Math.ceil(low / step - 1e-9), length = Math.floor(high / step + 1e-9) - first + 1;
    const largest = Math.max(Math.abs(low), Math.abs(high));
    return Array.from({ length }, (_, k) => (first + k) * step + 0) // 0 and not -0
      .map((value) => [value, tickText(value, largest, step)]);
  }

  function logTicks(low, high) {
    const found = [], first = Math.floor(Math.log10(low)), last = Math.log10(high);
    const every = Math.ceil((last - first) / 7);
    for (let power = first; power <= last; power += every) {
      for (const m of last - first < 4 ? [1, 2, 5] : [1]) found.push(m * 10 ** power);
    }
    const inside = found.filter((value) => value >= low && value <= high);
    return inside.length < 3 ? ticks(low, high, 5) : inside.map((value) => [value, valueText(value)]);
  }

  function tickText(value, largest, step) {
    if (value !== 0 && largest < 1e-2) return exponential(value, Math.round(Math.log10(Math.abs(value) / step)));
    const [scale, suffix] = largest >= 1e9 ? [1e9, "G"] : largest >= 1e6 ? [1e6, "M"]
      : largest >= 2e4 ? [1e3, "k"] : [1, ""];
    const digits = Math.max(0, Math.min(8, Math.ceil(-Math.log10(step / scale) - 1e-9)));
    return (value / scale).toLocaleString("en", { maximumFractionDigits: digits }) + (value ? suffix : "");
  }

  function valueText(value) {
    if (value === null) return "–"; // not finite
    if (value !== 0 && Math.abs(value) < 1e-3) return exponential(value, 3);
    return value.toLocaleString("en", { maximumSignificantDigits: 5 });
  }

  function exponential(value, digits) {
    return value.toExponential(Math.max(0, Math.min(6, digits))).replace(/\.?0*e-/, "e−");
  }

  function valueRange(view, parts) {
    const seen = parts.flatMap(({ y, from, to }) => y.slice(from, to)).filter((y) => canDraw(view, y));
    if (seen.length === 0) return [0.1, 1];
    const low = seen.reduce((a, b) => Math.min(a, b)), high = seen.reduce((a, b) => Math.max(a, b));
    const factor = low === high ? 2 : Math.exp(0.05 * (Math.log(high) - Math.log(low))); // beyond both ends
    const pad = low === high ? Math.abs(low) * 0.1 || 1 : (high - low) * 0.06;
    if (view.log) return [Math.max(low / factor, 1e-307), Math.min(high * factor, 1e307)];
    return [low < 0 ? low - pad : Math.max(0, low - pad), high + pad];
  }

  function draw(view) {
    const width = Math.max(240, view.box.clientWidth), height = view.box.clientHeight;
    const [low, high] = state.range ?? wholeRange();
    const parts = shown(view).map((part) => ({ // what is in the range, and one point on both sides
      ...part, from: Math.max(0, firstFrom(part.x, low) - 1), to: Math.min(part.x.length, firstFrom(part.x, high) + 1),
    }));
    const [bottom, top] = valueRange(view, parts);
    const flat = view.log ? Math.log : (value) => value;
    const inner = width - LEFT - RIGHT, tall = height - TOP - BOTTOM;
    view.toX = (x) => LEFT + (x - low) / (high - low) * inner;
    view.fromX = (pixel) => low + Math.min(1, Math.max(0, (pixel - LEFT) / inner)) * (high - low);
    view.toY = (y) => TOP + (flat(top) - flat(y)) / (flat(top) - flat(bottom)) * tall;
    view.svg.replaceChildren();
    view.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const grid = make(view.svg, "g", { class: "grid" });
    const [name, size] = data.units[state.axis];
    for (const [x, text] of ticks(low, high, Math.max(2, Math.floor(width / 110)))) {
      const at = view.toX(x), last = at > width - 34;
      make(grid, "line", { x1: at, x2: at, y1: TOP, y2: height - BOTTOM });
      make(grid, "text", { x: last ? width : at, y: height - 8, "text-anchor": last ? "end" : "middle" },
        size === null ? text : `${text} ${name}`);
    }
    for (const [y, text] of view.log ? logTicks(bottom, top) : ticks(bottom, top, 5)) {
      const at = view.toY(y);
      make(grid, "line", { x1: LEFT, x2: width - RIGHT, y1: at, y2: at });
      make(grid, "text", { x: LEFT - 7, y: at + 4, "text-anchor": "end" }, text);
    }
    const clip = make(view.svg, "clipPath", { id: `clip${views.indexOf(view)}` });
    make(clip, "rect", { x: LEFT - 4, y: TOP - 4, width: inner + 8, height: tall + 5 });
    const plot = make(view.svg, "g", { "clip-path": `url(#${clip.id})` });
    for (const part of parts) drawCurve(view, plot, part);
    view.mark = make(view.svg, "g", { class: "cursor" });
    view.selection = make(view.svg, "rect", { class: "selection", y: TOP, height: tall, width: 0 });
    showCursor(view);
  }

  function drawCurve(view, plot, { curve, x, y, from, to }) {
    const markers = curve.style === "markers" && to - from <= 200;
    let path = "", dots = "";
    for (let i = from; i < to; i++) {
      if (!canDraw(view, y[i])) continue; // a gap in the line
      const point = `${view.toX(x[i]).toFixed(1)} ${view.toY(y[i]).toFixed(1)}`;
      const joined = i > from && canDraw(view, y[i - 1]);
      path += (joined ? "L" : "M") + point;
      if (markers || (!joined && !canDraw(view, y[i + 1]))) dots += `M${point}h0`;
    }
    make(plot, "path", { d: path, class: `curve ${curve.style} c${curve.color}` });
    make(plot, "path", { d: dots, class: `dots c${curve.color}` });
  }

  function showCursor(view) { // a line, and in the legend the values of the nearest points
    const at = state.cursor, [name, size] = data.units[state.axis];
    view.mark.replaceChildren();
    const place = size === null ? Math.round(at).toLocaleString("en") : valueText(at);
    view.place.textContent = at === null ? "" : name === "step" ? `step ${place}` : `${place} ${name}`;
    for (const curve of view.curves) curve.output.textContent = "";
    if (at === null) return;
    const across = view.toX(at);
    make(view.mark, "line", { x1: across, x2: across, y1: TOP, y2: view.box.clientHeight - BOTTOM });
    for (const { curve, x, y } of shown(view)) {
      let i = Math.min(x.length - 1, firstFrom(x, at));
      if (i > 0 && at - x[i - 1] < x[i] - at) i--;
      curve.output.textContent = valueText(y[i]);
      if (canDraw(view, y[i])) make(view.mark, "circle", { cx: view.toX(x[i]), cy: view.toY(y[i]), r: 3.5, class: `c${curve.color}` });
    }
  }

  function redraw() {
    views.forEach(draw);
    reset.disabled = state.range === null;
  }

  function moveCursor(place) {
    state.cursor = place;
    views.forEach(showCursor);
  }

  function zoom(low, high) { // without numbers: to the whole range
    const whole = wholeRange(), range = [Math.max(whole[0], low), Math.min(whole[1], high)];
    const part = (range[1] - range[0]) / (whole[1] - whole[0]);
    state.range = part > 1e-6 && part < 1 ? range : null;
    redraw();
  }

  function onKey(event) {
    const [low, high] = state.range ?? wholeRange(), at = state.cursor ?? (low + high) / 2;
    const move = { ArrowLeft: -0.01, ArrowRight: 0.01 }[event.key];
    const factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
    if (move) moveCursor(Math.min(high, Math.max(low, at + move * (high - low))));
    else if (factor) zoom(at - (at - low) * factor, at + (high - at) * factor);
    else if (event.key === "Escape") zoom();
    else return;
    event.preventDefault();
  }

  function listen(view) {
    let start = null; // of the drag, on the axis
    const here = (event) => view.fromX(event.clientX - view.svg.getBoundingClientRect().left);
    const on = (name, act) => view.svg.addEventListener(name, act);
    on("pointerdown", (event) => {
      if (event.button === 0) start = here(event);
      view.svg.setPointerCapture(event.pointerId);
    });
    on("pointermove", (event) => {
      moveCursor(here(event));
      const [a, b] = [start ?? state.cursor, state.cursor].map(view.toX);
      view.selection.setAttribute("x", Math.min(a, b));
      view.selection.setAttribute("width", Math.abs(a - b));
    });
    on("pointerup", (event) => {
      const ends = [start ?? here(event), here(event)].sort((a, b) => a - b);
      start = null;
      moveCursor(here(event));
      if (view.toX(ends[1]) - view.toX(ends[0]) > 6) zoom(...ends);
      else view.selection.setAttribute("width", 0);
    });
    on("pointercancel", () => { start = null; draw(view); });
    on("pointerleave", (event) => { if (event.pointerType === "mouse" && start === null) moveCursor(null); });
    on("dblclick", () => zoom());
    on("keydown", onKey);
  }

  const onClick = (button, act) => // which returns whether the button is pressed now
    button.addEventListener("click", () => button.setAttribute("aria-pressed", act()));

  function build(figure) {
    const view = { curves: data.charts[Number(figure.dataset.chart)], log: false };
    for (const name of ["box", "svg", "place"]) view[name] = figure.querySelector(`.${name}`);
    onClick(figure.querySelector(".bar button"), () => { view.log = !view.log; draw(view); return view.log; });
    figure.querySelectorAll(".legend button").forEach((key, number) => {
      const curve = view.curves[number];
      curve.output = key.querySelector("output");
      onClick(key, () => { curve.hidden = !curve.hidden; redraw(); return !curve.hidden; });
    });
    listen(view);
    views.push(view);
  }

  document.querySelectorAll("figure[data-chart]").forEach(build);
  const choices = document.querySelectorAll("button[data-axis]");
  for (const button of choices) onClick(button, () => {
    for (const other of choices) other.setAttribute("aria-pressed", false);
    Object.assign(state, { axis: button.dataset.axis, range: null, cursor: null });
    redraw();
    return true;
  });
  reset.addEventListener("click", () => zoom());
  new ResizeObserver(redraw).observe(document.querySelector("main"));
})();
