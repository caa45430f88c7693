"use strict";
const PAGE = 50, CHILDREN = 200;
const byId = (id) => document.getElementById(id);

/** Makes an element; children that are no elements become text, never HTML. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== ""));
  return made;
}

async function unpacked() {
  if (!("DecompressionStream" in window)) {
    throw new Error("this browser is too old to unpack the data (2023 or newer is needed)");
  }
  const bytes = Uint8Array.from(atob(byId("data").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

function scaled(number, step, units) {
  let place = 0;
  while (Math.abs(number) >= step && place < units.length - 1) { number /= step; place++; }
  return `${number < 100 ? Number(number.toPrecision(3)) : Math.round(number)} ${units[place]}`;
}
const inBytes = (number) => scaled(number, 1024, ["B", "KiB", "MiB", "GiB"]);
const inFlops = (number) => scaled(number, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"]);
const inTime = (number) => scaled(number, 1000, ["us", "ms", "s"]);
const counted = (number, one, many) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

/** The remarks, and what is worked out from them once. */
class Remarks {
  constructor(data) {
    Object.assign(this, data);
    this.count = (data.rows.kind || []).length;
    this.scopeNames = new Array(data.scopes.parent.length);
    this.names = new Array(this.count);
    this.searched = new Array(this.count);
  }
  text(column, row) {
    const number = this.rows[column][row];
    return number < 0 ? "" : this.strings[number];
  }
  kind(row) { return this.kinds[this.rows.kind[row]]; }
  scopeName(scope) {
    if (this.scopes.parent[scope] < 0) return ""; // the graph itself
    let name = this.scopeNames[scope];
    if (name === undefined) {
      const outer = this.scopeName(this.scopes.parent[scope]);
      const label = this.strings[this.scopes.label[scope]];
      name = this.scopeNames[scope] = outer ? `${outer}/${label}` : label;
    }
    return name;
  }
  name(row) {
    if (this.names[row] === undefined) {
      const scope = this.scopeName(this.rows.scope[row]);
      this.names[row] = [scope, this.text("label", row)].filter(Boolean).join("/");
    }
    return this.names[row];
  }
  /** What a search looks at, in small letters. */
  haystack(row) {
    if (this.searched[row] === undefined) {
      const parts = [this.name(row), this.text("op", row), this.text("reason", row), this.now(row), this.text("line", row)];
      this.searched[row] = parts.join("\n").toLowerCase();
    }
    return this.searched[row];
  }
  path(row) {
    const steps = [];
    for (let at = this.rows.path[row]; at >= 0; at = this.paths.parent[at]) {
      steps.unshift(this.strings[this.paths.label[at]]);
    }
    return steps;
  }
  now(row) {
    const kind = this.kind(row);
    if (kind === "converted") return this.graphs[this.rows.graph[row]].dtype;
    if (kind === "cast") return this.text("rule", row) === "to_float32" ? "cast to float32" : "cast to " + this.graphs[this.rows.graph[row]].dtype;
    return { kept: "float32", near_miss: "near miss" }[kind] || kind;
  }
  size(row) {
    const { flops, bytes } = this.rows;
    return flops[row] != null ? inFlops(flops[row]) : bytes[row] != null ? inBytes(bytes[row]) : "";
  }
  /** Counts of each scope with all that is in it, and lists of what is directly in it. */
  index() {
    const { parent } = this.scopes, size = parent.length;
    this.low = new Uint32Array(size); this.kept = new Uint32Array(size);
    this.flops = new Float64Array(size);
    this.casts = new Uint32Array(size); this.castBytes = new Float64Array(size);
    this.inner = Array.from({ length: size }, () => []);
    this.rowsIn = Array.from({ length: size }, () => []);
    for (let row = 0; row < this.count; row++) {
      const scope = this.rows.scope[row], kind = this.kind(row);
      this.rowsIn[scope].push(row);
      this.flops[scope] += this.rows.flops[row] || 0;
      if (kind === "converted") this.low[scope]++;
      else if (kind === "kept" && this.rows.list[row] >= 0) this.kept[scope]++;
      else if (kind === "cast") { this.casts[scope]++; this.castBytes[scope] += this.rows.bytes[row] || 0; }
    }
    for (let scope = 0; scope < size; scope++) if (parent[scope] >= 0) this.inner[parent[scope]].push(scope);
    for (let scope = size - 1; scope >= 0; scope--) { // what is inside has the higher number
      const outer = parent[scope];
      if (outer < 0) continue;
      this.low[outer] += this.low[scope]; this.kept[outer] += this.kept[scope];
      this.flops[outer] += this.flops[scope];
      this.casts[outer] += this.casts[scope]; this.castBytes[outer] += this.castBytes[scope];
    }
  }
}

/** Everything known of one remark. */
function facts(remarks, row) {
  const list = element("dl", { class: "facts" });
  const say = (what, value) => {
    if (value) list.append(element("div", {}, element("dt", {}, what), element("dd", {}, value)));
  };
  say("node", remarks.name(row));
  say("function", remarks.graphs[remarks.rows.graph[row]].name);
  say("op", [remarks.text("op", row), remarks.text("attr", row)].filter(Boolean).join(", type "));
  say("list", remarks.text("list", row));
  say("now", remarks.now(row));
  say("why", remarks.text("reason", row) || remarks.text("rule", row));
  say("to know", remarks.text("advice", row));
  const path = remarks.path(row);
  if (path.length) {
    const shown = path.length > 12 ? [...path.slice(0, 6), `… ${path.length - 12} more …`, ...path.slice(-6)] : path;
    say("blocked by", element("ol", {}, ...shown.map((step) => element("li", {}, step))));
  }
  say("shape", remarks.text("shape", row));
  const { flops, bytes, time } = remarks.rows;
  say("arithmetic", flops[row] != null ? inFlops(flops[row]) : "");
  say("moves", bytes[row] != null ? inBytes(bytes[row]) : "");
  say("time", time[row] != null ? `${inTime(time[row])} by the cost table` : "");
  say("made at", remarks.text("line", row).replaceAll("\n", ", in "));
  return list;
}

/** A name that breaks behind its slashes first. */
function breakable(name) {
  return name.split("/").flatMap((step, place) => (place ? ["/", element("wbr"), step] : [step]));
}

function mark(remarks, row) {
  return element("span", { class: `dot ${remarks.kind(row)}`, "aria-hidden": "true" });
}

class Tree {
  constructor(remarks) {
    this.remarks = remarks;
    this.select = byId("tree-graph");
    this.select.append(...graphOptions(remarks));
    this.select.addEventListener("change", () => this.show(Number(this.select.value)));
  }
  show(graph) {
    this.select.value = String(graph);
    const list = this.children(graph); // the first scopes are the graphs
    byId("tree").replaceChildren(list.childElementCount ? list : element("p", { class: "quiet" }, "Nothing was decided here."));
    const only = list.children.length === 1 && list.querySelector("details");
    if (only) only.open = true;
  }
  children(scope) {
    const { remarks } = this, list = element("ul");
    const entries = [
      // What computes comes first: an optimizer often stands before all layers.
      ...remarks.inner[scope].slice().sort((a, b) => !remarks.flops[a] - !remarks.flops[b]).map((inner) => () => this.scope(inner)),
      ...remarks.rowsIn[scope].map((row) => () => this.leaf(row)),
    ];
    this.append(list, entries, 0);
    return list;
  }
  /** Adds entries, and a button that adds the next. */
  append(list, entries, start) {
    const end = Math.min(start + CHILDREN, entries.length);
    for (const make of entries.slice(start, end)) list.append(make());
    if (end === entries.length) return;
    const next = Math.min(CHILDREN, entries.length - end);
    const button = element("button", { type: "button" }, `Show ${next} of ${entries.length - end} more`);
    const item = element("li", {}, button);
    button.addEventListener("click", () => {
      item.remove();
      this.append(list, entries, end);
      list.children[end].querySelector("summary").focus();
    });
    list.append(item);
  }
  scope(scope) {
    const { remarks } = this;
    let label = remarks.strings[remarks.scopes.label[scope]];
    while (remarks.inner[scope].length === 1 && !remarks.rowsIn[scope].length) {
      scope = remarks.inner[scope][0];
      label += `/${remarks.strings[remarks.scopes.label[scope]]}`;
    }
    const low = remarks.low[scope], all = low + remarks.kept[scope], casts = remarks.casts[scope];
    const share = all ? (100 * low) / all : 0;
    const told = [
      all ? `${Math.floor(share)}%, ${low} of ${all} low` : "",
      casts ? `${counted(casts, "cast", "casts")}, ${inBytes(remarks.castBytes[scope])}` : "",
    ].filter(Boolean).join(" · ");
    const meter = element("span", { class: "meter", "aria-hidden": "true" });
    meter.style.background = all
      ? `linear-gradient(to right, var(--low) ${share}%, var(--kept) ${share}%)` : "var(--track)";
    return this.folded(() => [this.children(scope)],
      meter, element("span", { class: "name" }, label), element("span", { class: "told" }, told));
  }
  leaf(row) {
    const { remarks } = this;
    const name = remarks.text("label", row) || remarks.text("rule", row) || remarks.kind(row);
    return this.folded(() => [element("div", { class: "detail" }, facts(remarks, row))],
      element("span", { class: "name" }, mark(remarks, row), name),
      element("span", { class: "told" }, [remarks.text("op", row), remarks.now(row), remarks.size(row)].filter(Boolean).join(" · ")));
  }
  folded(content, ...summary) {
    const details = element("details", {}, element("summary", {}, ...summary));
    details.addEventListener("toggle", () => {
      if (details.open && details.childElementCount === 1) details.append(...content());
    });
    return element("li", {}, details);
  }
}

function graphOptions(remarks, all) {
  const options = remarks.graphs.map((graph, number) => element("option", { value: number }, graph.name));
  return all ? [element("option", { value: "" }, all), ...options] : options;
}

class Table {
  constructor(remarks) {
    this.remarks = remarks;
    this.start = 0;
    this.body = document.querySelector("#table tbody");
    this.inputs = { search: byId("search"), graph: byId("of-graph"), kind: byId("of-kind"), rule: byId("of-rule"), order: byId("order") };
    this.inputs.graph.append(...graphOptions(remarks, "all"));
    this.inputs.kind.append(element("option", { value: "" }, "all"), ...remarks.kinds.map((kind, number) =>
      element("option", { value: number }, { converted: "target dtype", kept: "float32", near_miss: "near miss" }[kind] || kind)));
    const rules = new Map();
    for (let row = 0; row < remarks.count; row++) {
      const rule = remarks.rows.rule[row];
      if (rule >= 0) rules.set(rule, (rules.get(rule) || 0) + 1);
    }
    this.inputs.rule.append(element("option", { value: "" }, "any"),
      ...[...rules].sort((a, b) => b[1] - a[1]).map(([rule, number]) =>
        element("option", { value: rule }, `${remarks.strings[rule].replaceAll("_", " ")} (${number.toLocaleString("en")})`)));
    let timer = 0;
    byId("filters").addEventListener("submit", (event) => event.preventDefault());
    byId("filters").addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => this.find(), 120);
    });
    byId("before").addEventListener("click", () => this.turn(-PAGE));
    byId("after").addEventListener("click", () => this.turn(PAGE));
    this.find();
  }
  /** Fills the form and looks. */
  ask(filters) {
    for (const [name, input] of Object.entries(this.inputs)) input.value = filters[name] ?? "";
    this.find();
    byId("nodes").scrollIntoView();
    this.inputs.search.focus({ preventScroll: true });
  }
  find() {
    const { remarks, inputs } = this, { rows } = remarks;
    const words = inputs.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = ["graph", "kind", "rule"].filter((name) => inputs[name].value !== "")
      .map((name) => [rows[name], Number(inputs[name].value)]);
    const found = [];
    for (let row = 0; row < remarks.count; row++) {
      if (wanted.every(([column, value]) => column[row] === value)
        && (!words.length || words.every((word) => remarks.haystack(row).includes(word)))) found.push(row);
    }
    const by = inputs.order.value && rows[inputs.order.value];
    if (by) found.sort((a, b) => (by[b] ?? -1) - (by[a] ?? -1));
    this.found = found;
    this.start = 0;
    this.draw();
  }
  turn(step) {
    this.start += step;
    this.draw();
    byId("table").scrollIntoView();
  }
  draw() {
    const end = Math.min(this.start + PAGE, this.found.length);
    this.body.replaceChildren(...this.found.slice(this.start, end).map((row) => this.row(row)));
    byId("found").textContent = this.found.length
      ? `${(this.start + 1).toLocaleString("en")} to ${end.toLocaleString("en")} of ${counted(this.found.length, "remark", "remarks")}`
      : "No remark fits.";
    byId("before").disabled = !this.start;
    byId("after").disabled = end >= this.found.length;
  }
  row(row) {
    const { remarks } = this, cell = (label, ...content) => element("td", { "data-label": label }, ...content);
    const button = element("button", { type: "button", class: "link", "aria-expanded": "false" },
      ...breakable(remarks.name(row) || remarks.text("rule", row) || remarks.kind(row)));
    const line = remarks.text("line", row).split("\n")[0];
    const made = element("tr", {},
      element("th", { scope: "row" }, button),
      cell("Op", remarks.text("op", row)),
      cell("Now", element("span", {}, mark(remarks, row), remarks.now(row))),
      cell("Why", remarks.text("reason", row)),
      cell("Size", remarks.size(row)),
      cell("Python line", element("span", { title: line }, line.split("/").pop())));
    made.cells[4].classList.add("number");
    for (const empty of [...made.cells].filter((one) => !one.textContent)) empty.classList.add("empty");
    button.addEventListener("click", () => {
      const open = button.getAttribute("aria-expanded") === "true";
      button.setAttribute("aria-expanded", String(!open));
      if (open) made.nextElementSibling.remove();
      else made.after(element("tr", { class: "more" }, element("td", { colspan: 6 }, facts(remarks, row))));
    });
    return made;
  }
}

async function copy(button) {
  const code = button.previousElementSibling;
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "Copied";
  } catch { // not from a file, in some browsers: select it for the user to copy
    getSelection().selectAllChildren(code);
    button.textContent = "Selected";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
}

async function start() {
  try {
    const remarks = new Remarks(await unpacked());
    remarks.index();
    const tree = new Tree(remarks), table = new Table(remarks);
    const first = document.querySelector("[data-graph]");
    if (remarks.graphs.length) tree.show(first ? Number(first.dataset.graph) : 0);
    document.addEventListener("click", ({ target }) => {
      const { graph, search } = target.dataset;
      if (graph !== undefined) {
        tree.show(Number(graph));
        byId("graph").scrollIntoView();
        tree.select.focus({ preventScroll: true });
      } else if (search !== undefined) table.ask({ search });
      else if ("copy" in target.dataset) copy(target);
    });
    document.documentElement.dataset.ready = String(Math.round(performance.now()));
  } catch (error) {
    byId("found").textContent = `The nodes cannot be shown: ${error.message}.`;
  }
}
start();
