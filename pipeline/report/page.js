"use strict";
// Draws the page from the JSON in #run (pipeline.report says what is in it). All text of the run is set as text, never as HTML.

const run = JSON.parse(document.getElementById("run").textContent);
const steps = run.steps;
const charts = [];
const COLOURS = 8, HEIGHT = 190, MARGIN = {top: 8, right: 10, bottom: 22, left: 46};

function element(tag, attributes = {}, ...children) {
  const node = tag.includes(":") ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter(child => child != null));
  return node;
}
const svg = (tag, attributes, ...children) => element("svg:" + tag, attributes, ...children);
const colour = number => `var(--c${number % COLOURS})`;

// ---- numbers -------------------------------------------------------------------------------------------------------

// Below `small` numbers are written with an exponent.
function format(value, unit = "", small = 1e-3) {
  if (value == null) return "–";
  if (unit === "%") return trim((100 * value).toFixed(Math.abs(value) < 0.1 ? 1 : 0)) + " %";
  const size = Math.abs(value);
  let text;
  if (size < 1e-12) text = "0";
  else if (size >= 1e6) text = trim((value / 1e6).toPrecision(3)) + "M";
  else if (size >= 1e4) text = trim((value / 1e3).toPrecision(3)) + "k";
  else if (size >= 1000) text = value.toFixed(0);
  else if (size >= small) text = trim(value.toPrecision(3));
  else text = value.toExponential(2).replace(/\.?0+e/, "e");
  return text.replace("-", "−");
}
const trim = text => text.includes("e") ? text : text.includes(".") ? text.replace(/\.?0+$/, "") : text;
const signed = (value, unit) => (value > 0 ? "+" : "") + format(value, unit);
// A difference of shares is in percentage points; a score of about 1 reads best with two decimals.
const points = value => format(100 * value).replace(/(\.\d)\d+/, "$1");
const score = value => value == null ? "–" : Math.abs(value) < 10 ? value.toFixed(2).replace("-", "−") : format(value);

function duration(seconds) {
  if (seconds == null) return "–";
  const s = Math.round(seconds), parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = Math.max(0, parts.findIndex(([size]) => s >= size));
  if (s < 1) return "0 s";
  return parts.slice(first, first + 2)
    .map(([size, name], place) => [Math.floor((place ? s % parts[first][0] : s) / size), name])
    .filter(([count], place) => count || !place).map(([count, name]) => `${count} ${name}`).join(" ");
}

function niceTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 2.5, 5, 10].map(unit => unit * power).find(unit => unit >= rough * 0.999);
  const ticks = [];
  for (let place = Math.ceil(low / size - 1e-9); place * size <= high + size * 1e-9; place++) ticks.push(place * size);
  return ticks.map(tick => Math.abs(tick) < size * 1e-9 ? 0 : tick);
}

// Exponential moving average, corrected for its start; gaps stay gaps.
function smooth(values, weight) {
  if (!weight) return values;
  let sum = 0, mass = 0;
  return values.map(value => {
    if (value == null) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

// ---- one chart -----------------------------------------------------------------------------------------------------

const GAPS = "A step whose groups each scored all of their samples alike has no advantage, and so no loss, gradient or mismatch.";

class Chart {
  // spec: {title, unit, kind: "line" | "stack", plain, x?, series: [{name, values, low?, high?}], bound?: {name, value}, gaps?, note?}
  constructor(spec) {
    this.spec = spec;
    this.x = spec.x || steps;
    this.log = false;
    this.legend = element("div", {class: "legend"});
    this.drawing = svg("svg", {class: "chart", height: HEIGHT, role: "img", tabindex: 0, "aria-label": this.description()});
    this.drawing.addEventListener("pointermove", event => this.follow(event));
    this.drawing.addEventListener("pointerleave", () => pointAt(null));
    this.drawing.addEventListener("click", event => openRollouts(this.nearest(event)));
    this.drawing.addEventListener("keydown", event => this.key(event));
    const tools = element("span", {class: "tools"});
    if (this.spread() > 100) tools.append(this.toggle("log", pressed => { this.log = pressed; this.draw(); }));
    tools.append(this.toggle("wide", pressed => this.card.classList.toggle("large", pressed)));
    this.card = element("section", {class: "card"},
      element("h4", {title: spec.note}, spec.title, element("span", {class: "unit"}, spec.unit === "%" ? "" : spec.unit || ""), tools),
      this.legend, this.drawing, spec.gaps ? element("p", {class: "gaps", title: GAPS}, `${spec.gaps} of ${this.x.length} steps have no value: nothing to learn from, or not measured`) : null);
    charts.push(this);
    new ResizeObserver(() => this.draw()).observe(this.card);
  }

  description() {
    return this.spec.title + ": " + this.spec.series.map(({name, values}) => {
      const known = values.filter(value => value != null);
      return `${name} from ${format(known[0])} to ${format(known.at(-1))}`;
    }).join("; ");
  }

  toggle(name, act) {
    const button = element("button", {type: "button", "aria-pressed": "false", onclick: () => {
      const pressed = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", pressed);
      act(pressed);
    }}, name);
    return button;
  }

  // How many times the largest value exceeds the smallest; 0 where a logarithm has no meaning.
  spread() {
    const known = this.spec.series.flatMap(({values}) => values.filter(value => value != null));
    const low = Math.min(...known);
    return this.spec.kind !== "stack" && low > 0 ? Math.max(...known) / low : 0;
  }

  follow(event) { pointAt(this.nearest(event)); }

  nearest(event) {
    const place = event.clientX - this.drawing.getBoundingClientRect().left;
    const step = this.first + (place - MARGIN.left) / (this.width - MARGIN.left - MARGIN.right) * (this.last - this.first);
    return closest(this.x, step);
  }

  key(event) {
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!move) return;
    event.preventDefault();
    const place = pointed == null ? this.x.length : this.x.indexOf(closest(this.x, pointed));
    pointAt(this.x[Math.min(this.x.length - 1, Math.max(0, place + move))]);
  }

  draw() {
    const {spec, x} = this, width = this.drawing.clientWidth;
    if (!width) return;
    this.width = width;
    this.first = steps.length ? Math.min(x[0], steps[0]) : x[0];
    this.last = Math.max(x.at(-1), steps.at(-1) ?? x.at(-1));
    if (this.first === this.last) this.last = this.first + 1;
    const weight = this.weight();
    const drawn = spec.series.map(series => smooth(series.values, weight));
    const layers = spec.kind === "stack" ? stack(drawn) : drawn.map(values => ({high: values}));
    this.scale(layers, weight);
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const shapes = layers.flatMap((layer, number) => this.shapes(layer, number, weight));
    this.drawing.replaceChildren(...this.axes(), ...shapes, ...this.marks());
    this.marker = svg("g");
    this.drawing.append(this.marker);
    this.point(pointed);
  }

  scale(layers, weight) {
    const values = layers.flatMap(({high}) => high)
      .concat(this.spec.series.flatMap(({low, high}) => [...(low || []), ...(high || [])]),
        weight ? this.spec.series.flatMap(({values}) => values) : [], this.spec.bound ? [this.spec.bound.value] : [])
      .filter(value => value != null);
    let low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!values.length) [low, high] = [0, 1];
    if (this.log) [low, high] = [Math.log10(low), Math.log10(high)];
    else if (low >= 0 && (low < high * 0.6 || this.spec.kind === "stack")) low = 0;
    const room = high - low || Math.abs(high) || 1;
    if (high === low) [low, high] = low === 0 ? [0, 1] : [low - room / 2, high + room / 2];
    else [low, high] = [low === 0 && !this.log ? 0 : low - room * 0.05, high + room * 0.05];
    this.clipped = this.spec.kind === "stack" && high > 6 * median(layers.at(-1).high) ? high : null;
    if (this.clipped) high = 3 * median(layers.at(-1).high);
    if (this.spec.unit === "%" && low >= 0) high = Math.min(high, 1.02);
    [this.low, this.high] = [low, high];
  }

  weight() { return this.spec.plain ? 0 : smoothing(); }

  px(step) { return MARGIN.left + (step - this.first) / (this.last - this.first) * (this.width - MARGIN.left - MARGIN.right); }

  py(value) {
    const place = this.log ? Math.log10(value) : value;
    if (this.clipped && value > this.high) return MARGIN.top;
    return HEIGHT - MARGIN.bottom - (place - this.low) / (this.high - this.low) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  }

  axes() {
    const right = this.width - MARGIN.right, bottom = HEIGHT - MARGIN.bottom, nodes = [];
    let ticks = niceTicks(this.low, this.high, 4);
    if (this.log) {
      const whole = ticks.filter(Number.isInteger);
      ticks = (whole.length > 1 ? whole : ticks).map(tick => 10 ** tick);
    }
    for (const tick of ticks) {
      const y = this.py(tick);
      if (y < MARGIN.top - 1 || y > bottom + 1) continue;
      nodes.push(svg("line", {class: "grid", x1: MARGIN.left, x2: right, y1: y, y2: y}),
        svg("text", {x: MARGIN.left - 7, y: y + 4, "text-anchor": "end"}, format(tick, this.spec.unit, 1e-2).replace(" %", "%")));
    }
    nodes.push(svg("line", {class: "axis", x1: MARGIN.left, x2: right, y1: bottom, y2: bottom}));
    for (const tick of niceTicks(this.first, this.last, Math.max(2, this.width / 90)).filter(Number.isInteger)) {
      const x = this.px(tick), anchor = x > right - 12 ? "end" : "middle";
      nodes.push(svg("line", {class: "axis", x1: x, x2: x, y1: bottom, y2: bottom + 4}),
        svg("text", {x, y: HEIGHT - 5, "text-anchor": anchor}, format(tick)));
    }
    nodes.push(svg("text", {class: "faint", x: MARGIN.left - 7, y: HEIGHT - 5, "text-anchor": "end"}, "step"));
    return nodes;
  }

  // What stands above the curves: the bound, and how far a spike goes that is cut off.
  marks() {
    const right = this.width - MARGIN.right, {bound} = this.spec, nodes = [];
    const label = (y, words) => svg("text", {class: "label", x: right - 2, y, "text-anchor": "end"}, words);
    if (this.clipped) nodes.push(label(MARGIN.top + 11, `↑ up to ${format(this.clipped)}`));
    if (bound) {
      const y = this.py(bound.value);
      nodes.push(svg("line", {class: "bound", x1: MARGIN.left, x2: right, y1: y, y2: y}), label(y + 13, bound.name));
    }
    return nodes;
  }

  shapes({low, high}, number, weight) {
    const series = this.spec.series[number], paint = colour(number), nodes = [];
    if (low) return [svg("path", {class: "layer", d: this.area(low, high), fill: paint})];
    if (series.low) nodes.push(svg("path", {class: "band", d: this.area(series.low, series.high), fill: paint}));
    if (weight) nodes.push(svg("path", {class: "curve raw", d: this.line(series.values), stroke: paint}));
    nodes.push(svg("path", {class: "curve", d: this.line(high), stroke: paint}));
    const known = high.filter(value => value != null).length;
    if (this.spec.x || known < 3)
      high.forEach((value, place) => value != null && nodes.push(this.dot(place, value, paint, 3.5)));
    return nodes;
  }

  dot(place, value, paint, radius) {
    return svg("circle", {class: "dot", cx: this.px(this.x[place]), cy: this.py(value), r: radius, fill: paint});
  }

  line(values) {
    let path = "", pen = "M";
    values.forEach((value, place) => {
      if (value == null) { pen = "M"; return; }
      path += `${pen}${this.px(this.x[place]).toFixed(1)},${this.py(value).toFixed(1)}`;
      pen = "L";
    });
    return path;
  }

  area(low, high) {
    const places = high.map((_, place) => place).filter(place => high[place] != null && low[place] != null);
    if (!places.length) return "";
    const at = (values, place) => `${this.px(this.x[place]).toFixed(1)},${this.py(values[place]).toFixed(1)}`;
    return "M" + places.map(place => at(high, place)).join("L") + "L" + places.reverse().map(place => at(low, place)).join("L") + "Z";
  }

  // Show the values at `step` (null: the last ones) in the legend, and the cursor.
  point(step) {
    const place = step == null ? null : this.x.indexOf(closest(this.x, step));
    this.legend.replaceChildren(...this.spec.series.map(({name, values, low, high}, number) => {
      const here = place ?? values.findLastIndex(value => value != null);
      const interval = low && low[here] != null ? ` (${format(low[here], this.spec.unit)} to ${format(high[here], this.spec.unit)})` : "";
      return element("span", {}, element("i", {style: null, class: "c" + number % COLOURS}), name + " ",
        element("b", {}, format(values[here], this.spec.unit)), interval);
    }));
    if (place != null) this.legend.append(element("span", {class: "at"}, `step ${this.x[place]}`));
    if (!this.marker) return;
    this.marker.replaceChildren();
    if (place == null) return;
    const x = this.px(this.x[place]);
    this.marker.append(svg("line", {class: "cursor", x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom}));
    if (this.spec.kind === "stack") return;
    const weight = this.weight();
    this.spec.series.forEach(({values}, number) => {
      const value = smooth(values, weight)[place];
      if (value != null) this.marker.append(this.dot(place, value, colour(number), 3.5));
    });
  }
}

const median = values => [...values].sort((a, b) => a - b)[values.length >> 1];

function stack(layers) {
  let base = layers[0].map(() => 0);
  return layers.map(values => {
    const low = base, high = values.map((value, place) => low[place] + (value ?? 0));
    base = high;
    return {low, high};
  });
}

function closest(sorted, value) {
  return sorted.reduce((best, each) => Math.abs(each - value) < Math.abs(best - value) ? each : best, sorted[0]);
}

let pointed = null;
function pointAt(step) {
  if (step === pointed) return;
  pointed = step;
  for (const chart of charts) chart.point(step);
}

const slider = document.getElementById("smoothing");
const smoothing = () => Number(slider.value);
function showSmoothing() { document.getElementById("smoothing-value").textContent = smoothing() ? smoothing().toFixed(2) : "off"; }
slider.addEventListener("input", () => { showSmoothing(); charts.forEach(chart => chart.draw()); });

// ---- head ----------------------------------------------------------------------------------------------------------

function section(id, title, ...children) {
  document.getElementById("links").append(element("a", {href: "#" + id}, title));
  return element("section", {id}, element("h2", {}, title), ...children);
}
const note = text => element("p", {class: "note"}, text);

function tile({label, value, detail, tone, wide}) {
  const shown = Array.isArray(value) ? [value[0], element("span", {class: "arrow"}, "→"), value[1]] : [value];
  return element("div", {class: "tile" + (wide ? " wide" : "")}, element("div", {class: "label"}, label),
    element("div", {class: "value"}, ...shown),
    detail ? element("div", {class: "detail " + (tone || "")}, detail) : null);
}

function evaluationTile({name, unit, before, after, change, error, prompts}) {
  if (before == null) return tile({label: name, value: format(after, unit), detail: `${prompts} prompts`});
  const sure = Math.abs(change) > error, share = unit === "%";
  const gain = share ? `${change > 0 ? "+" : ""}${points(change)} ± ${points(error)} points` : `${signed(change)} ± ${format(error)}`;
  return tile({label: name, value: [format(before, unit), format(after, unit)], tone: !sure ? "" : change > 0 ? "good" : "bad",
    detail: `${gain} (95 %) on ${prompts} prompts${sure ? "" : ": no clear change"}`});
}

function head() {
  const {reward, speed, staleness} = run.summary;
  const tiles = [];
  if (reward) tiles.push(tile({label: "Reward", value: [score(reward.first), score(reward.last)], detail: reward.detail}));
  tiles.push(tile({label: "Steps", value: `${run.step} of ${run.total_steps ?? "?"}`, detail: run.duration_s == null ? null : `in ${duration(run.duration_s)}, from the start to the last trained step`}));
  if (speed) tiles.push(tile({label: "Samples trained", value: `${format(speed.samples_per_s)}/s`, detail: speed.detail}));
  if (staleness) tiles.push(tile({label: "Staleness", value: score(staleness.mean), detail: staleness.detail}));
  tiles.push(tile({label: "Dropped", value: run.drops.length ? run.drops.reduce((sum, [, count]) => sum + count, 0) + " groups" : "nothing",
    detail: run.drops.map(([reason, count]) => `${reason} ${count}`).join(", ")}));
  if (run.delivered) tiles.push(tile({label: "Delivered model", value: run.delivered.uri, detail: run.delivered.detail, wide: true}));
  return element("header", {}, element("h1", {}, run.name, element("span", {class: "pill " + run.status.tone}, run.status.label)),
    element("p", {class: "subtitle"}, run.subtitle), run.status.detail ? note(run.status.detail) : null,
    run.evaluations.length ? element("div", {class: "tiles results"}, ...run.evaluations.map(evaluationTile)) : null,
    run.evaluations.length ? note("avg@k: mean score of k samples of each held-out prompt; pass@k: share of the prompts with a right one among k.") : null,
    element("div", {class: "tiles"}, ...tiles));
}

function curves() {
  const groups = run.charts.map(({title, charts}) => [element("h3", {}, title),
    element("div", {class: "charts"}, ...charts.map(spec => new Chart(spec).card))]).flat();
  if (!groups.length) groups.push(note("No step has been trained yet."));
  if (run.others.length) {
    const rest = element("details", {}, element("summary", {}, `${run.others.length} more metrics`));
    rest.addEventListener("toggle", () => {
      if (rest.children.length === 1) rest.append(element("div", {class: "charts"}, ...run.others.map(spec => new Chart(spec).card)));
    });
    groups.push(rest);
  }
  return section("curves", "Curves", note("Values at the pointer appear in every legend; a click opens the rollouts of that step."), ...groups);
}

// ---- rollouts ------------------------------------------------------------------------------------------------------

const browser = {kind: "trained", place: 0, order: "as sampled", search: ""};
const browsed = () => run.rollouts[browser.kind];

function rollouts() {
  const kinds = Object.keys(run.rollouts).filter(kind => run.rollouts[kind].length);
  if (!kinds.length) return section("rollouts", "Rollouts", note("No rollout has been trained yet."));
  browser.kind = kinds[0];
  const move = (text, by, name) => element("button", {type: "button", "aria-label": name, onclick: () => showRollouts(browser.place + by)}, text);
  const choice = (name, options, act) => {
    const select = element("select", {"aria-label": name, onchange: () => act(select.value)}, ...options.map(text => element("option", {}, text)));
    return select;
  };
  browser.range = element("input", {type: "range", min: 0, step: 1, "aria-label": "Step", oninput: () => showRollouts(Number(browser.range.value))});
  browser.output = element("output");
  browser.list = element("div");
  [browser.back, browser.forth] = [move("‹", -1, "Earlier step"), move("›", 1, "Later step")];
  const kind = choice("Kind", kinds, chosen => { browser.kind = chosen; showRollouts(Infinity); });
  const order = choice("Order", Object.keys(ORDERS), chosen => { browser.order = chosen; showRollouts(browser.place); });
  const search = element("input", {type: "search", placeholder: "text in responses", "aria-label": "Text in responses",
    oninput: () => { browser.search = search.value; showRollouts(browser.place); }});
  browser.select = kind;
  return section("rollouts", "Rollouts",
    note("Real samples, as they were trained or evaluated. Advantages are recomputed from the rewards by the run’s algorithm."),
    element("div", {class: "controls"}, element("span", {class: "steps"}, browser.back, browser.range, browser.forth, browser.output),
      kinds.length > 1 ? kind : null, order, search),
    browser.list);
}

function openRollouts(step) {
  if (!run.rollouts.trained.length || step == null) return;
  browser.kind = browser.select.value = "trained";
  const known = browsed().map(each => each.step);
  showRollouts(known.indexOf(closest(known, step)));
  document.getElementById("rollouts").scrollIntoView({behavior: "smooth"});
}

function showRollouts(place) {
  const last = browsed().length - 1;
  browser.place = Math.min(last, Math.max(0, place));
  const {step, groups, of} = browsed()[browser.place];
  browser.range.max = last;
  browser.range.value = browser.place;
  browser.output.textContent = `step ${step}` + (groups.length < of ? `, ${groups.length} of ${of} prompts` : "");
  browser.back.disabled = browser.place === 0;
  browser.forth.disabled = browser.place === last;
  const shown = groups.map(groupCard).filter(card => card != null);
  browser.list.replaceChildren(...(shown.length ? shown : [note("No response at this step contains that text.")]));
  browser.list.querySelectorAll(".text").forEach(fold);
}

const value = reward => reward ?? -Infinity;
const ORDERS = {"as sampled": () => 0, "best first": (a, b) => value(b.reward) - value(a.reward), "worst first": (a, b) => value(a.reward) - value(b.reward),
  "longest first": (a, b) => b.tokens - a.tokens};

function groupCard(group) {
  const wanted = browser.search.toLowerCase();
  const samples = group.samples.filter(sample => !wanted || sample.turns.some(([, said]) => said.toLowerCase().includes(wanted))).sort(ORDERS[browser.order]);
  if (!samples.length) return null;
  const rewards = group.samples.map(sample => sample.reward).filter(reward => reward != null);
  const meta = [["prompt", `#${group.index}`], ["set", group.set], ["answer", group.answer], ["mean reward", format(group.mean)],
    ["samples", group.samples.length < group.size ? `${group.samples.length} of ${group.size}` : group.size]];
  const bounds = [Math.min(0, ...rewards), Math.max(...rewards, 0)];
  return element("article", {class: "card group"},
    element("div", {class: "prompt"},
      element("div", {class: "meta"}, ...labelled(meta)), text(group.prompt)),
    ...samples.map(sample => sampleRow(sample, bounds)));
}

function sampleRow(sample, [low, high]) {
  const meter = element("div", {class: "meter"}, element("span"));
  const share = sample.reward == null || high === low ? 0 : (sample.reward - low) / (high - low);
  meter.firstChild.style.width = `${100 * share}%`;
  const kind = sample.advantage > 0 ? "up" : sample.advantage < 0 ? "down" : "";
  const facts = [...sample.rewards.map(([name, reward]) => [name, format(reward)]), ["turns", sample.turns.length > 1 ? sample.turns.filter(([observed]) => !observed).length : null],
    ["tokens", sample.tokens], ["ended by", sample.finish],
    ["policy", sample.version], ["staleness", sample.staleness], ["mean log μ", format(sample.logprob)]];
  return element("div", {class: "sample"},
    element("div", {class: "score"},
      element("div", {}, "reward ", element("b", {}, format(sample.reward))), meter,
      sample.advantage == null ? null : element("div", {}, "advantage ", element("b", {class: kind}, signed(sample.advantage)))),
    element("div", {},
      element("div", {class: "meta"}, sample.invalid ? element("span", {class: "badge"}, "not trained: " + sample.invalid) : null, ...labelled(facts)),
      ...sample.turns.map(([observed, said]) => observed ? observation(said) : text(said))));
}

const TERMS = {
  "mean log μ": "Mean log-probability of the response's tokens by the policy that sampled them, in nats",
  "policy": "Version that sampled: t is the term (starts of the trainer), s the optimizer step",
  "staleness": "Optimizer steps between the oldest version that made a token and the step that trained it",
  "mean reward": "Over the samples of this prompt; advantages are relative to it",
};

function labelled(facts) {
  return facts.filter(([, text]) => text != null && text !== "").map(([name, text]) => element("span", {title: TERMS[name]}, name + " ", element("b", {}, String(text))));
}

function text(content) {
  return element("pre", {class: "text" + (content ? "" : " empty")}, content || "(empty)");
}

function observation(content) {
  return element("div", {class: "observation"}, element("div", {class: "meta"}, "environment"), text(content));
}

function fold(block) {
  block.classList.add("folded");
  if (block.scrollHeight <= block.clientHeight + 4) { block.classList.remove("folded"); return; }
  const more = element("button", {class: "more", type: "button", onclick: () => {
    more.textContent = block.classList.toggle("folded") ? "show all" : "show less";
  }}, "show all");
  block.after(more);
}

// ---- configuration -------------------------------------------------------------------------------------------------

function configuration() {
  const cards = found => found.map(({title, rows}) => element("section", {class: "card" + (rows.some(([, , set]) => set) ? "" : " default")},
    element("h4", {}, title), element("table", {}, element("tbody", {}, ...rows.map(([key, text, set]) =>
      element("tr", {class: set ? "" : "default"}, element("td", {class: "key"}, key), element("td", {class: "val"}, text)))))));
  const parts = run.given.length
    ? [element("p", {class: "note"}, "What the RLJob sets, as it is written there"), element("div", {class: "settings"}, ...cards(run.given)),
       element("details", {}, element("summary", {}, "All values that the run was made with, defaults included"),
         element("div", {class: "settings all"}, ...cards(run.configuration)))]
    : [element("div", {class: "settings"}, ...cards(run.configuration))];
  if (run.attempts.length)
    parts.push(element("h3", {}, "Changes between attempts"), element("div", {class: "card"}, element("table", {}, element("tbody", {},
      ...run.attempts.map(([attempt, key, before, after]) => element("tr", {}, element("td", {class: "key"}, `attempt ${attempt}: ${key}`),
        element("td", {class: "val"}, `${before} → ${after}`)))))));
  return section("configuration", "Configuration", ...parts);
}

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = (root.dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
});
slider.value = steps.length >= 1000 ? 0.95 : steps.length >= 100 ? 0.8 : steps.length >= 30 ? 0.5 : 0;
showSmoothing();
document.getElementById("top").append(head(), curves(), rollouts(), configuration(),
  element("footer", {}, ...run.omissions.map(note), note(`${run.uri} · run ${run.run_id} · written by miles report on ${run.generated}`)));
if (browser.list) showRollouts(Infinity);
