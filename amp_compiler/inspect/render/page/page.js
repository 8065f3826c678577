"use strict";
(() => {
  const data = Layout.decode(JSON.parse(document.getElementById("data").textContent));
  const $ = id => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  const colours = data.colours;
  const fill = precision => (colours[precision] || colours[""])[0];
  const ink = precision => (colours[precision] || colours[""])[1];
  const parts = data.stages.some(s => s.nodes.some(n => n.part === "backward")) ? ["forward", "backward"] : ["forward"];
  const state = {stage: data.stages.length - 1, open: {}, chosen: null, module: null, views: {}, fitted: {}};
  let shown = {};  // part -> {made, picture, group, svg}

  // ---------------------------------------------------------------------------------------------- words

  const size = bytes => {
    for (const [unit, step] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
      if (bytes >= step) return (bytes / step).toFixed(1) + " " + unit;
    }
    return bytes + " B";
  };
  const many = (number, word) => number.toLocaleString("en") + " " + word + (number === 1 ? "" : "s");
  const flops = number => number >= 1e9 ? (number / 1e9).toFixed(1) + " GFLOP" : (number / 1e6).toFixed(1) + " MFLOP";
  const short = {bfloat16: "bf16", float16: "f16", float32: "f32"};
  const tail = (path, parts = 1) => path.split(".").slice(-parts).join(".");

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "onclick") made.addEventListener("click", value);
      else if (key === "style") made.style.cssText = value;
      else made.setAttribute(key, value);
    }
    made.append(...children.filter(child => child !== null && child !== undefined));
    return made;
  }

  function draw(tag, attributes, text) {
    const made = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  const badge = precision => element("span",
    {class: "badge", style: `background:${fill(precision)};color:${ink(precision)}`}, precision || "no precision");

  /** Title and detail of a node or module, as measured and drawn. */
  const sayFor = byName => thing => {
    if (Layout.isBox(thing)) {
      const of = thing.total;
      const casts = of.casts ? `  ·  ${many(of.casts, "cast")}, ${size(of.castBytes)}` : "";
      return {title: thing.cls ? `${thing.title}  ${thing.cls}` : thing.title, detail: many(of.ops, "op") + casts};
    }
    const node = thing.node;
    if (node.kind === "cast") {
      const source = byName.get(node.inputs[0]);
      const what = source && Layout.HIDDEN.has(source.kind) && source.label ? tail(source.label) + " " : "";
      return {title: `${what}→ ${node.value.split("[")[0]}  ${size(node.bytes)}`, detail: ""};
    }
    if (node.kind === "input") return {title: node.label || node.name, detail: node.value};
    if (node.kind === "output") return {title: "output", detail: ""};
    const op = node.op.replace("higher_order::", "");
    return {title: thing.of ? `${op}  ${tail(thing.of)}` : op, detail: node.value};
  };

  // ---------------------------------------------------------------------------------------------- panes

  function panes() {
    $("panes").replaceChildren(...parts.map(part => {
      const svg = draw("svg", {"data-part": part});
      const pane = element("div", {class: "pane"}, parts.length > 1 ? element("h2", {}, part) : null, svg);
      move(svg, part);
      return pane;
    }));
  }

  function picture() {
    const stage = data.stages[state.stage], before = data.stages[state.stage - 1];
    const old = new Map(before && before.graph === stage.graph ? before.nodes.map(n => [n.name, n]) : []);
    shown = {};
    for (const svg of document.querySelectorAll(".pane svg")) {
      const part = svg.dataset.part;
      const made = Layout.tree(stage.nodes, part, data.classes);
      if (!state.open[part]) state.open[part] = Layout.firstOpen(made.root, parts.length > 1 ? 30 : 42);
      state.open[part].add(made.root.key);
      const say = sayFor(made.byName);
      const whole = Layout.layout(made, state.open[part], say);
      const group = draw("g", {});
      const mark = node => !old.size ? "" : !old.has(node.name) ? " new" : old.get(node.name) !== node ? " changed" : "";
      paint(group, whole, say, mark, made);
      svg.replaceChildren(arrows(), group);
      shown[part] = {made, whole, group, svg, say};
      if (!state.views[part]) fit(part);
      look(part);
    }
    highlight();
  }

  function arrows() {
    const defs = draw("defs", {});
    for (const name of Object.keys(colours)) {
      const marker = draw("marker", {id: "arrow-" + (name || "none"), viewBox: "0 0 8 8", refX: 7, refY: 4,
                                     markerUnits: "userSpaceOnUse", markerWidth: 7, markerHeight: 7, orient: "auto"});
      marker.append(draw("path", {d: "M0,0.8L8,4L0,7.2z", fill: colours[name][2]}));
      defs.append(marker);
    }
    return defs;
  }

  function paint(group, whole, say, mark, made) {
    const lines = draw("g", {});
    for (const line of whole.lines) {
      const precision = carried(line.value);
      const path = draw("path", {d: Layout.curve(line.points), class: "line", stroke: (colours[precision] || colours[""])[2]});
      if (line.into) path.setAttribute("marker-end", `url(#arrow-${precision || "none"})`);
      path.dataset.names = line.names.join(" ");
      if (line.stub) path.classList.add("stub");
      path.append(draw("title", {}, `${line.value.name}: ${line.value.value}`));
      lines.append(path);
    }
    const things = whole.boxes.map(box => {
      const holder = draw("g", {transform: `translate(${box.x.toFixed(1)},${box.y.toFixed(1)})`});
      holder.dataset.key = box.thing.key;
      if (box.inside) paintOpen(holder, box, say, mark, made);
      else if (Layout.isBox(box.thing)) paintModule(holder, box, say);
      else paintNode(holder, box, say, mark);
      return holder;
    });
    const opened = things.filter((_, i) => whole.boxes[i].inside), others = things.filter((_, i) => !whole.boxes[i].inside);
    group.append(...opened, lines, ...others);
  }

  /** The precision of the value that a node returns. */
  function carried(node) {
    const dtype = node.value.replace("(", "").split("[")[0];
    return {bf16: "bfloat16", f16: "float16", f32: "float32"}[dtype] || "other";
  }

  function paintOpen(holder, box, say, mark, made) {
    holder.setAttribute("class", "module open");
    holder.append(draw("rect", {width: box.width, height: box.height, rx: 9, class: "frame"}), heading(box.thing, 17));
    holder.append(draw("text", {x: box.width - 18, y: 17, "font-size": 14, fill: "#8b93a1"}, "–"));
    const inner = draw("g", {});
    paint(inner, box.inside, say, mark, made);
    holder.append(inner);
  }

  function heading(thing, y) {
    const made = draw("text", {x: 12, y, "font-size": 12.5, fill: "#1f2937"});
    made.append(draw("tspan", {"font-weight": 600}, thing.title));
    if (thing.cls) made.append(draw("tspan", {dx: 8, "font-size": 11, fill: "#8b93a1"}, thing.cls));
    return made;
  }

  function paintModule(holder, box, say) {
    const {detail} = say(box.thing), of = box.thing.total, width = box.width;
    holder.setAttribute("class", "module");
    holder.append(draw("rect", {width, height: box.height, rx: 9, class: "frame"}), heading(box.thing, 19));
    holder.append(draw("text", {x: 12, y: 35, "font-size": 10.5, fill: "#6b7280"}, detail));
    let x = 12;
    for (const name of Object.keys(colours)) {
      const share = (of.precision[name] || 0) / Math.max(of.ops, 1) * (width - 24);
      if (!share) continue;
      holder.append(draw("rect", {x, y: 43, width: share, height: 7, fill: colours[name][2], "pointer-events": "none"}));
      x += share;
    }
  }

  function paintNode(holder, box, say, mark) {
    const {title, detail} = say(box.thing), node = box.thing.node, middle = box.width / 2;
    const isCast = node.kind === "cast", isEnd = node.kind === "input" || node.kind === "output";
    const [paper, dark] = isCast ? data.cast : [fill(node.precision), ink(node.precision)];
    holder.setAttribute("class", "op" + mark(node));
    holder.append(draw("rect", {width: box.width, height: box.height, rx: isCast || isEnd ? box.height / 2 : 5, fill: paper, class: "frame"}));
    const centred = {x: middle, "text-anchor": "middle", fill: dark};
    const first = isCast ? 14 : detail ? 16 : 17;
    holder.append(draw("text", {...centred, y: first, "font-size": isCast ? 10.5 : 12, "font-weight": isCast ? 500 : 600}, title));
    if (detail) holder.append(draw("text", {...centred, y: 30, "font-size": 10, opacity: .75}, detail));
    holder.append(draw("title", {}, node.reason ? `${node.name}: ${node.reason}` : node.name));
  }

  // ------------------------------------------------------------------------------------- moving about

  function look(part) {
    const view = state.views[part];
    shown[part].group.setAttribute("transform", `translate(${view.x},${view.y}) scale(${view.k})`);
  }

  function fit(part) {
    const {whole, svg} = shown[part], {width, height} = svg.getBoundingClientRect();
    const across = (width - 32) / Math.max(whole.width, 1), down = (height - 32) / Math.max(whole.height, 1);
    const k = Math.max(Math.min(across, Math.max(down, 0.55), 1.25), 0.05);  // tall graphs: begin at the top, readable
    state.views[part] = {k, x: (width - whole.width * k) / 2, y: Math.max((height - whole.height * k) / 2, 16)};
  }

  function move(svg, part) {
    let held = null;
    svg.addEventListener("pointerdown", event => { held = {x: event.clientX, y: event.clientY, moved: false}; });
    window.addEventListener("pointermove", event => {
      if (!held) return;
      const dx = event.clientX - held.x, dy = event.clientY - held.y;
      if (!held.moved && Math.hypot(dx, dy) < 4) return;
      svg.classList.add("held");
      state.views[part].x += dx; state.views[part].y += dy;
      held = {x: event.clientX, y: event.clientY, moved: true};
      look(part);
    });
    window.addEventListener("pointerup", event => {
      const click = held && !held.moved;
      held = null;
      svg.classList.remove("held");
      if (click && svg.contains(event.target)) press(event.target, part);
    });
    svg.addEventListener("wheel", event => {
      event.preventDefault();
      const view = state.views[part], {left, top} = svg.getBoundingClientRect();
      if (!event.ctrlKey && !event.metaKey && event.shiftKey) { view.x -= event.deltaY; look(part); return; }
      const factor = Math.exp(-event.deltaY * 0.0012), k = Math.min(Math.max(view.k * factor, 0.03), 3);
      const x = event.clientX - left, y = event.clientY - top;
      view.x = x - (x - view.x) * k / view.k; view.y = y - (y - view.y) * k / view.k; view.k = k;
      look(part);
    }, {passive: false});
  }

  function press(target, part) {
    const holder = target.closest("[data-key]");
    if (!holder) { choose(null); return; }
    const key = holder.dataset.key;
    if (key.startsWith("n:")) choose(key.slice(2)); else toggle(part, key);
  }

  function toggle(part, key) {
    const open = state.open[part];
    const before = corner(part, key);
    if (open.has(key)) open.delete(key); else open.add(key);
    state.module = {part, key};
    state.chosen = null;
    picture();
    const after = corner(part, key);
    if (before && after) {  // the box that was clicked stays under the pointer
      state.views[part].x += before.left - after.left; state.views[part].y += before.top - after.top;
      look(part);
    }
    panel();
  }

  const holderOf = (part, key) => shown[part] && shown[part].group.querySelector(`[data-key="${CSS.escape(key)}"]`);
  const corner = (part, key) => { const found = holderOf(part, key); return found && found.getBoundingClientRect(); };

  /** Open the modules around a node, center it, and show its details. */
  function reveal(name) {
    for (const part of parts) {
      const item = shown[part].made.items.get(name);
      if (!item) continue;
      for (let up = item.parent; up; up = up.parent) state.open[part].add(up.key);
      picture();
      const box = corner(part, item.key), pane = shown[part].svg.getBoundingClientRect(), view = state.views[part];
      if (view.k < 0.5) view.k = 0.8;
      look(part);
      const now = corner(part, item.key) || box;
      view.x += pane.left + pane.width / 2 - (now.left + now.width / 2);
      view.y += pane.top + pane.height / 2 - (now.top + now.height / 2);
      look(part);
    }
    choose(name);
  }

  // ------------------------------------------------------------------------------------------- choosing

  function choose(name) {
    state.chosen = name;
    state.module = null;
    highlight();
    panel();
  }

  function highlight() {
    const stage = data.stages[state.stage];
    const node = state.chosen && stage.nodes.find(n => n.name === state.chosen);
    const twins = new Set(node ? stage.nodes.filter(n => n !== node && kin(n, node)).map(n => n.name) : []);
    for (const part of parts) {
      if (!shown[part]) continue;
      for (const holder of shown[part].group.querySelectorAll("[data-key]")) {
        const key = holder.dataset.key, name = key.slice(2);
        holder.classList.toggle("chosen", (key.startsWith("n:") && name === state.chosen)
          || (state.module !== null && state.module.part === part && state.module.key === key));
        holder.classList.toggle("twin", key.startsWith("n:") && twins.has(name));
      }
      const reads = new Set(node ? Layout.sources(shown[part].made, node).map(i => i.node.name) : []);
      if (state.chosen) reads.add(state.chosen);
      for (const path of shown[part].group.querySelectorAll(".line")) {
        path.classList.toggle("on", state.chosen !== null && path.dataset.names.split(" ").includes(state.chosen));
      }
    }
  }

  /** True if two nodes come from one op of the forward graph, one in the forward and one in the backward. */
  const kin = (a, b) => a.part !== b.part && a.origin !== "" && a.origin === b.origin && a.kind === "call";

  function link(node) {
    const label = Layout.HIDDEN.has(node.kind) ? node.label || node.name : node.name;
    const made = Layout.HIDDEN.has(node.kind) ? element("span", {}, label)
      : element("a", {onclick: () => reveal(node.name)}, label);
    const about = node.kind === "cast" ? `cast, ${size(node.bytes)}` : Layout.HIDDEN.has(node.kind) ? node.kind : node.op;
    return element("li", {}, made, " ", element("small", {}, `${about}  ${node.value}`));
  }

  function list(title, nodes) {
    if (!nodes.length) return [];
    return [element("h3", {}, title), element("ul", {}, ...nodes.slice(0, 14).map(link)),
            nodes.length > 14 ? element("p", {class: "dimmed"}, `and ${nodes.length - 14} more`) : null];
  }

  function rows(pairs) {
    return element("table", {}, ...pairs.filter(([, value]) => value !== "" && value !== null).map(([name, value]) =>
      element("tr", {}, element("td", {}, name), element("td", {}, value))));
  }

  function panel() {
    const stage = data.stages[state.stage];
    const node = state.chosen && stage.nodes.find(n => n.name === state.chosen);
    const children = node ? ofNode(node, stage) : state.module ? ofModule() : ofGraph(stage);
    $("panel").replaceChildren(...children.filter(child => child !== null));
    $("panel").scrollTop = 0;
  }

  function ofNode(node, stage) {
    const byName = new Map(stage.nodes.map(n => [n.name, n]));
    const through = found => found.kind === "select" ? stage.nodes.filter(n => n.inputs.includes(found.name)).flatMap(through) : [found];
    const inputs = [...new Set(node.inputs)].map(name => byName.get(name)).filter(Boolean);
    const users = stage.nodes.filter(n => n.inputs.includes(node.name)).flatMap(through);
    const casts = [...inputs, ...users].filter(n => n.kind === "cast");
    const source = node.source.match(/^(.*?):(\d+) in (\S+): ?(.*)$/);
    return [
      element("h1", {}, node.name), element("p", {}, badge(node.kind === "cast" ? "cast" : node.precision), "  ",
        element("span", {class: "dimmed"}, node.kind === "cast" ? `${size(node.bytes)} written` : node.op)),
      node.reason ? element("p", {class: "why", id: "reason"}, node.reason) : null,
      rows([["shape", element("code", {}, node.value)], ["rule", node.rule], ["class", node.cls],
            ["module", node.module ? `${node.module}${data.classes[node.module] ? " (" + data.classes[node.module] + ")" : ""}` : ""],
            ["part", parts.length > 1 ? node.part : ""], ["FLOPs", node.flops ? flops(node.flops) : ""],
            ["made from", node.origin && node.origin !== node.name ? node.origin : ""]]),
      ...(source ? [element("h3", {}, "Source"), element("p", {}, element("code", {}, source[4])),
                    element("p", {class: "dimmed"}, `${source[1].split("/").slice(-2).join("/")}:${source[2]} in ${source[3]}`)] : []),
      casts.length ? element("p", {}, `${many(casts.length, "cast")} around it: ${size(casts.reduce((s, n) => s + n.bytes, 0))}`) : null,
      ...list("Reads", inputs), ...list("Read by", users),
      ...list(node.part === "forward" ? "Its backward" : "Its forward", stage.nodes.filter(n => kin(n, node))),
    ];
  }

  function ofModule() {
    const {part, key} = state.module, path = key.slice(2);
    const made = shown[part].made.boxes.get(path);
    if (!made) return ofGraph(data.stages[state.stage]);
    const of = made.total, nodes = inside(made);
    return [
      element("h1", {}, made.path || "the model"), element("p", {class: "dimmed"}, made.cls || ""),
      element("p", {}, element("button", {onclick: () => toggle(part, key)}, state.open[part].has(key) ? "Close" : "Open")),
      rows([["ops", String(of.ops)], ...Object.entries(of.precision).map(([name, number]) => [name || "none", String(number)]),
            ["casts", `${of.casts} (${size(of.castBytes)})`], ["FLOPs", of.flops ? flops(of.flops) : ""]]),
      ...list("Largest casts", nodes.filter(n => n.kind === "cast").sort((a, b) => b.bytes - a.bytes).slice(0, 8)),
      ...list("Kept in fp32", nodes.filter(isKept).slice(0, 10)),
    ];
  }

  /** Ops that only pass values on: their precision is that of their input. */
  const CARRIES = new Set(["t", "view", "transpose", "permute", "expand", "reshape", "unsqueeze", "squeeze", "slice", "select",
                           "clone", "_unsafe_view", "detach", "alias", "dropout", "contiguous", "flatten"]);
  const isKept = node => node.kind === "call" && node.precision === "float32" && !CARRIES.has(node.op);

  const inside = made => made.children.flatMap(child => Layout.isBox(child) ? inside(child) : [child.node]);

  function ofGraph(stage) {
    const casts = stage.nodes.filter(n => n.kind === "cast").sort((a, b) => b.bytes - a.bytes);
    const fp32 = stage.nodes.filter(n => isKept(n) && n.part === "forward");
    return [
      element("h1", {}, "What you see"),
      element("p", {}, "Boxes are modules: click one to open or close it. Coloured nodes are ops, coloured by the precision "
        + "that they run in; click one to see why. Pink pills are casts, with the bytes that they write. Step through the "
        + "passes above; what a pass changed has a blue border. Drag to move, scroll to zoom, / to search."),
      ...data.notes.map(note => element("p", {class: "why"}, note)),
      ...list("Largest casts", casts.slice(0, 8)), ...list("Kept in fp32", fp32.slice(0, 12)),
    ];
  }

  // --------------------------------------------------------------------------------------------- stages

  function stages() {
    let graph = "";
    const made = [];
    data.stages.forEach((stage, number) => {
      if (stage.graph !== graph) { graph = stage.graph; made.push(element("i", {}, graph)); }
      const button = element("button", {title: stage.note || `${(stage.seconds * 1e3).toFixed(0)} ms`, onclick: () => go(number)}, stage.name);
      button.className = stage.modified ? "changed" : "";
      button.dataset.stage = number;
      made.push(button);
    });
    $("stages").replaceChildren(...made);
    $("slider").max = data.stages.length - 1;
  }

  function go(number) {
    const graph = data.stages[state.stage].graph;
    state.stage = Math.min(Math.max(number, 0), data.stages.length - 1);
    if (data.stages[state.stage].graph !== graph) { state.views = {}; }
    $("slider").value = state.stage;
    $("back").disabled = state.stage === 0;
    $("next").disabled = state.stage === data.stages.length - 1;
    for (const button of $("stages").querySelectorAll("button")) {
      const now = Number(button.dataset.stage) === state.stage;
      button.classList.toggle("now", now);
      if (now) button.scrollIntoView({block: "nearest", inline: "nearest"});
    }
    if (!data.stages[state.stage].nodes.some(n => n.name === state.chosen)) state.chosen = null;
    totals();
    picture();
    panel();
  }

  function totals() {
    const stage = data.stages[state.stage], before = data.stages[state.stage - 1];
    const ops = stage.nodes.filter(n => n.kind === "call"), casts = stage.nodes.filter(n => n.kind === "cast");
    const total = (value, name) => element("div", {class: "total"}, element("b", {}, value), element("span", {}, name));
    const by = Object.keys(colours).map(name => [name, ops.filter(n => n.precision === name).length]).filter(([, n]) => n);
    const bar = element("div", {class: "bar"}, ...by.map(([name, n]) =>
      element("i", {title: `${n} ${name}`, style: `width:${n / Math.max(ops.length, 1) * 100}%;background:${colours[name][2]}`})));
    $("totals").replaceChildren(
      total(ops.length.toLocaleString("en"), "ops"),
      element("div", {class: "mix"}, bar, element("span", {}, by.map(([name, n]) => `${n} ${short[name] || name || "none"}`).join("   "))),
      total(casts.length.toLocaleString("en"), "casts"), total(size(casts.reduce((s, n) => s + n.bytes, 0)), "written by casts"),
      total((data.low_flops_share * 100).toFixed(1) + " %", "of matmul FLOPs low"));
    let told = stage.note || (stage.modified ? "" : "changed nothing");
    if (before && before.graph === stage.graph && stage.modified) {
      const old = new Map(before.nodes.map(n => [n.name, n])), names = new Set(stage.nodes.map(n => n.name));
      const came = stage.nodes.filter(n => !old.has(n.name)), went = before.nodes.filter(n => !names.has(n.name));
      const other = stage.nodes.filter(n => old.has(n.name) && old.get(n.name).precision !== n.precision && n.kind === "call");
      const of = (found, word) => found.length ? [`${many(found.filter(n => n.kind === "cast").length, "cast")} and `
        + `${many(found.filter(n => n.kind !== "cast").length, "node")} ${word}`] : [];
      told = [...of(came, "added"), ...of(went, "removed"), ...(other.length ? [`${many(other.length, "op")} changed precision`] : [])].join(", ")
        || "only annotations of nodes changed";
    } else if (before && before.graph !== stage.graph) told = "the graph as torch returns it";
    $("told").replaceChildren(element("b", {}, stage.name), told ? ": " + told : "");
  }

  // --------------------------------------------------------------------------------------------- search

  function find(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return [];
    return data.stages[state.stage].nodes.filter(node => {
      if (Layout.HIDDEN.has(node.kind)) return false;
      const all = `${node.name} ${node.op} ${node.module} ${node.precision} ${node.reason} ${node.source} ${node.kind}`.toLowerCase();
      return words.every(word => all.includes(word));
    });
  }

  let hits = [], at = 0;
  function search() {
    hits = find($("search").value);
    at = 0;
    $("hits").hidden = !$("search").value.trim();
    $("hits").replaceChildren(
      ...hits.slice(0, 60).map((node, number) => element("div", {class: number === at ? "now" : "", onclick: () => take(number)},
        element("b", {}, node.name), " ", badge(node.kind === "cast" ? "cast" : node.precision),
        element("small", {}, [node.module, node.reason].filter(Boolean).join("  ·  ")))),
      element("small", {}, hits.length > 60 ? `and ${hits.length - 60} more` : hits.length ? many(hits.length, "hit") : "nothing found"));
  }

  function take(number) {
    $("hits").hidden = true;
    if (hits[number]) reveal(hits[number].name);
  }

  // ---------------------------------------------------------------------------------------------- start

  function setAll(open) {
    for (const part of parts) {
      state.open[part] = new Set([shown[part].made.root.key, ...(open ? [...shown[part].made.boxes.values()].map(b => b.key) : [])]);
      state.views[part] = null;
    }
    picture();
  }

  $("title").textContent = data.title;
  $("policy").textContent = `${data.graph} graph  ·  level ${data.level}  ·  ${data.dtype}`;
  const words = {bfloat16: "bf16", float16: "fp16", float32: "fp32", other: "other (integers, booleans, fp64)"};
  $("legend").append(...Object.keys(words).filter(name => data.stages.some(s => s.nodes.some(n => n.precision === name))).flatMap(name =>
    [element("i", {class: "swatch", style: `background:${fill(name)}`}), words[name]]),
    element("i", {class: "swatch", style: `background:${data.cast[0]}`}), "cast");
  colours.cast = [data.cast[0], data.cast[1], data.cast[1]];
  $("back").addEventListener("click", () => go(state.stage - 1));
  $("next").addEventListener("click", () => go(state.stage + 1));
  $("slider").addEventListener("input", () => go(Number($("slider").value)));
  $("open").addEventListener("click", () => setAll(true));
  $("close").addEventListener("click", () => setAll(false));
  $("fit").addEventListener("click", () => parts.forEach(part => { fit(part); look(part); }));
  $("search").addEventListener("input", search);
  $("search").addEventListener("keydown", event => {
    if (event.key === "Enter") take(at);
    if (event.key === "Escape") { $("hits").hidden = true; $("search").blur(); }
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      at = Math.min(Math.max(at + (event.key === "ArrowDown" ? 1 : -1), 0), Math.max(hits.length - 1, 0));
      [...$("hits").children].forEach((child, number) => child.classList.toggle("now", number === at));
      event.preventDefault();
    }
  });
  document.addEventListener("keydown", event => {
    if (event.target.tagName === "INPUT" && event.target.type === "search") return;
    if (event.key === "/") { $("search").focus(); event.preventDefault(); }
    else if (event.key === "ArrowLeft" && event.target !== $("slider")) go(state.stage - 1);
    else if (event.key === "ArrowRight" && event.target !== $("slider")) go(state.stage + 1);
    else if (event.key === "Escape") choose(null);
  });
  window.addEventListener("resize", () => parts.forEach(part => { fit(part); look(part); }));
  panes();
  stages();
  go(state.stage);
  document.body.dataset.ready = "yes";
})();
