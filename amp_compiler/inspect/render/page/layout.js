"use strict";
// The picture without the page: a tree of modules, what is visible of it, and where dagre puts it.
// An open module is laid out by itself and is then one box in its parent, so no single layout is large, and opening a
// module does not change the inside of the others.
const Layout = (() => {
  const HEADER = 26, PORT = 6, MANY = 3;
  const HIDDEN = new Set(["parameter", "buffer", "constant", "select"]);
  const textWidth = (text, size) => text.length * size * 0.63;

  // ------------------------------------------------------------------------------------------------ data

  const FIELDS = ["name", "kind", "op", "value", "precision", "reason", "rule", "cls", "module", "source", "part",
                  "label", "origin", "subgraph"];

  /** The page's data with every string in its place: stages of nodes, each node an object shared by its stages. */
  function decode(data) {
    const text = data.strings;
    const nodes = data.nodes.map(([strings, inputs, flops, bytes]) => {
      const node = {inputs: inputs.map(i => text[i]), flops, bytes};
      FIELDS.forEach((field, i) => { node[field] = text[strings[i]]; });
      return node;
    });
    return {...data, stages: data.stages.map(stage => ({...stage, nodes: stage.nodes.map(i => nodes[i])}))};
  }

  // ------------------------------------------------------------------------------------------------ tree

  /** The modules of one part (forward or backward) of a stage, as a tree of boxes that hold boxes and nodes. */
  function tree(nodes, part, classes) {
    const root = box("", "model", null);
    const boxes = new Map([["", root]]);
    const items = new Map();
    const open = path => {
      if (!boxes.has(path)) {
        const cut = path.lastIndexOf(".");
        const parent = open(cut < 0 ? "" : path.slice(0, cut));
        const made = box(path, path.slice(cut + 1), parent);
        parent.children.push(made);
        boxes.set(path, made);
      }
      return boxes.get(path);
    };
    const byName = new Map(nodes.map(node => [node.name, node]));
    for (const node of nodes) {
      if (node.part !== part || HIDDEN.has(node.kind)) continue;
      const inside = node.kind === "input" || node.kind === "output" ? "" : node.module;
      const path = node.subgraph ? (inside ? inside + "." : "") + node.subgraph : inside;
      const parent = open(path);
      const item = {key: "n:" + node.name, node, parent};
      parent.children.push(item);
      items.set(node.name, item);
    }
    flatten(root);
    for (const [path, made] of boxes) { made.cls = classes[path] || ""; }
    count(root);
    return {root, boxes, items, byName};
  }

  const box = (path, title, parent) => ({key: "m:" + path, path, title, parent, children: []});
  const isBox = thing => thing.children !== undefined;

  /** Replace a box that only contains one other box by that box, and a box of one op without casts by the op. */
  function flatten(made) {
    made.children.filter(isBox).forEach(flatten);
    made.children = made.children.flatMap(child => {
      if (!isBox(child)) return [child];
      const [only] = child.children;
      if (child.children.length === 1 && !isBox(only)) {
        only.parent = made;
        only.of = child.path;
        return [only];
      }
      if (child.children.length === 1 && isBox(only)) {
        only.title = child.title + "." + only.title;
        only.parent = made;
        return [only];
      }
      return [child];
    });
  }

  /** Totals of a box: ops by precision, casts, bytes cast, FLOPs. */
  function count(made) {
    const total = {precision: {}, ops: 0, casts: 0, castBytes: 0, flops: 0};
    for (const child of made.children) {
      const of = isBox(child) ? count(child) : single(child.node);
      for (const [name, number] of Object.entries(of.precision)) {
        total.precision[name] = (total.precision[name] || 0) + number;
      }
      for (const field of ["ops", "casts", "castBytes", "flops"]) total[field] += of[field];
    }
    made.total = total;
    return total;
  }

  function single(node) {
    const isCall = node.kind === "call", isCast = node.kind === "cast";
    return {precision: isCall ? {[node.precision]: 1} : {}, ops: +isCall, casts: +isCast,
            castBytes: isCast ? node.bytes : 0, flops: node.flops};
  }

  // ------------------------------------------------------------------------------------------- what is open

  /** Which boxes to open at first: level by level, as long as the picture stays small. */
  function firstOpen(root, limit = 42) {
    const open = new Set([root.key]);
    let visible = root.children.length, level = root.children.filter(isBox);
    while (level.length) {
      const more = level.reduce((sum, made) => sum + made.children.length - 1, 0);
      if (visible + more > limit) break;
      level.forEach(made => open.add(made.key));
      visible += more;
      level = level.flatMap(made => made.children.filter(isBox));
    }
    return open;
  }

  /** From the root down to the first closed box around an item, or to the item itself. */
  function chain(item, open) {
    const up = [];
    for (let thing = item; thing; thing = thing.parent) up.push(thing);
    up.reverse();
    const closed = up.findIndex(thing => isBox(thing) && !open.has(thing.key));
    return closed < 0 ? up : up.slice(0, closed + 1);
  }

  /** The shown nodes that a node reads, through parameters and selections that are not shown. */
  function sources(made, node, seen = new Set()) {
    return node.inputs.flatMap(name => {
      if (seen.has(name)) return [];
      seen.add(name);
      const source = made.byName.get(name);
      if (!source) return [];
      if (made.items.has(name)) return [made.items.get(name)];
      return source.kind === "select" ? sources(made, source, seen) : [];
    });
  }

  // ------------------------------------------------------------------------------------------------ layout

  function measure(thing, say) {
    if (isBox(thing)) {
      const {title, detail} = say(thing);
      return {width: Math.max(150, textWidth(title, 13) + 28, textWidth(detail, 10.5) + 28), height: 58};
    }
    const {title, detail} = say(thing);
    if (thing.node.kind === "cast") return {width: textWidth(title, 10.5) + 20, height: 20};
    return {width: Math.max(64, textWidth(title, 12) + 22, textWidth(detail, 10) + 22), height: detail ? 38 : 26};
  }

  /** Lay out what is visible of a tree. `say(thing)` returns its title and detail. Boxes nest: {x, y, width, height,
   *  thing, inside}; lines are lists of points in the coordinates of the box that holds them. */
  function layout(made, open, say) {
    const inside = new Map();  // key of an open box -> the edges, and the ports on its border
    const of = thing => {
      if (!inside.has(thing.key)) inside.set(thing.key, {edges: new Map(), ins: new Set(), outs: new Set()});
      return inside.get(thing.key);
    };
    const connect = (holder, a, b, line) => {
      const edges = of(holder).edges, key = a + "\n" + b;
      if (!edges.has(key)) edges.set(key, {a, b, lines: new Map()});
      const lines = edges.get(key).lines, id = line.from + "\n" + line.to;
      if (!lines.has(id)) lines.set(id, {...line, names: []});
      lines.get(id).names.push(line.source);
    };
    for (const item of made.items.values()) {
      const to = chain(item, open);
      for (const source of sources(made, item.node)) {
        const from = chain(source, open);
        let k = 0;
        while (k + 1 < from.length && k + 1 < to.length && from[k + 1] === to[k + 1]) k += 1;
        if (k + 1 >= from.length || k + 1 >= to.length) continue;  // both in one closed box
        const port = from[from.length - 1].key;
        const line = {source: source.node.name, value: source.node, from: "", to: ""};
        const out = from.length > k + 2 ? "o:" + port : "", into = to.length > k + 2 ? "i:" + port : "";
        connect(from[k], from[k + 1].key, to[k + 1].key, {...line, from: out, to: into});
        for (let d = k + 1; d + 1 < from.length; d += 1) {  // from the node out to the border of each box around it
          of(from[d]).outs.add("o:" + port);
          connect(from[d], from[d + 1].key, "o:" + port, {...line, from: d + 2 < from.length ? "o:" + port : ""});
        }
        for (let d = k + 1; d + 1 < to.length; d += 1) {
          of(to[d]).ins.add("i:" + port);
          connect(to[d], "i:" + port, to[d + 1].key, {...line, to: d + 2 < to.length ? "i:" + port : ""});
        }
      }
    }
    return place(made.root, open, say, of);
  }

  const known = new Map();  // what dagre made of a shape: the layers of a network mostly have one and the same

  /** dagre's places for nodes [width, height] and edges [from, to, weight], both by number. */
  function dagreLayout(sizes, edges) {
    const shape = JSON.stringify([sizes, edges]);
    if (!known.has(shape)) {
      const graph = new dagre.graphlib.Graph();
      graph.setGraph({rankdir: "TB", nodesep: 16, ranksep: 26, marginx: 14, marginy: 6});
      sizes.forEach(([width, height], i) => graph.setNode(String(i), {width, height}));
      edges.forEach(([a, b, weight]) => graph.setEdge(String(a), String(b), {weight}));
      if (sizes.length) dagre.layout(graph);
      known.set(shape, {nodes: sizes.map((_, i) => graph.node(String(i))), width: sizes.length ? graph.graph().width : 0,
                        lines: edges.map(([a, b]) => graph.edge(String(a), String(b)).points)});
    }
    return known.get(shape);
  }

  function place(holder, open, say, of) {
    const {edges, ins, outs} = of(holder);
    const inner = new Map(), numbers = new Map(), sizes = [], wanted = [], order = new Map();
    const add = (key, width, height) => { numbers.set(key, sizes.length); sizes.push([Math.round(width), Math.round(height)]); };
    for (const child of holder.children) {
      if (isBox(child) && open.has(child.key)) inner.set(child.key, place(child, open, say, of));
      const size = inner.get(child.key) || measure(child, say);
      add(child.key, size.width, size.height);
    }
    // ports have a rank of their own, held together by an invisible node above or below them
    for (const [ports, end] of [[ins, "top"], [outs, "bottom"]]) {
      if (ports.size) add(end, 1, 1);
      for (const port of ports) {
        add(port, PORT, 1);
        const [a, b] = end === "top" ? [end, port] : [port, end];
        wanted.push([numbers.get(a), numbers.get(b), 100]);
      }
    }
    const readers = new Map(), drawn = new Set();  // per value: how often it is read, and which reads have a line
    const values = lines => new Set([...lines.values()].flatMap(line => line.names));
    for (const {lines} of edges.values()) for (const name of values(lines)) readers.set(name, (readers.get(name) || 0) + 1);
    for (const [key, {a, b, lines}] of edges) {
      // a value with many readers (a mask in every layer) has one line; the other readers get a stub
      const names = [...values(lines)];
      if (!outs.has(b) && names.every(name => readers.get(name) > MANY && drawn.has(name))) continue;
      names.forEach(name => drawn.add(name));
      order.set(key, wanted.length);
      wanted.push([numbers.get(a), numbers.get(b), 1 + Math.min(lines.size, 3)]);
    }
    const found = dagreLayout(sizes, wanted);
    const nodeOf = key => found.nodes[numbers.get(key)];
    const head = holder.parent === null ? 0 : HEADER;
    const placed = holder.children.map(child => nodeOf(child.key));
    const margin = 10, w = found.width;  // the ranks of top and bottom are cut off
    const lift = Math.min(...placed.map(node => node.y - node.height / 2)) - margin - (ins.size ? 6 : 0);
    const lowest = Math.max(...placed.map(node => node.y + node.height / 2)) + margin + (outs.size ? 6 : 0);
    const width = Math.max(w, textWidth(say(holder).title, 13) + 40, 60);
    const height = placed.length ? lowest - lift + head : head;
    const shift = (width - w) / 2;
    const at = (x, y) => ({x: x + shift, y: y - lift + head});
    const ports = new Map();
    for (const port of ins) ports.set(port, {x: nodeOf(port).x + shift, y: 0});
    for (const port of outs) ports.set(port, {x: nodeOf(port).x + shift, y: height});
    const boxes = holder.children.map(child => {
      const node = nodeOf(child.key), corner = at(node.x - node.width / 2, node.y - node.height / 2);
      return {...corner, width: node.width, height: node.height, thing: child, inside: inner.get(child.key) || null};
    });
    const where = new Map(boxes.map(made => [made.thing.key, made]));
    const lines = [];
    for (const [key, {a, b, lines: bundle}] of edges) {
      if (!order.has(key)) {
        const to = where.get(b), x = to.x + to.width - 14, [line] = bundle.values();
        lines.push({points: [{x, y: to.y - 14}, {x, y: to.y}], names: line.names, value: line.value, into: true, stub: true});
        continue;
      }
      const points = found.lines[order.get(key)].map(p => at(p.x, p.y));
      for (const line of bundle.values()) {
        const path = points.slice();
        if (ports.has(a)) path[0] = ports.get(a);
        if (ports.has(b)) path[path.length - 1] = ports.get(b);
        if (line.from && where.has(a)) path[0] = onBorder(where.get(a), line.from, path[0]);
        if (line.to && where.has(b)) path[path.length - 1] = onBorder(where.get(b), line.to, path[path.length - 1]);
        lines.push({points: path, names: line.names, value: line.value, into: !ports.has(b) && !line.to});
      }
    }
    return {width, height, boxes, lines, ports};
  }

  function onBorder(made, port, otherwise) {
    const found = made.inside && made.inside.ports.get(port);
    return found ? {x: made.x + found.x, y: made.y + found.y} : otherwise;
  }

  /** A smooth path through points. */
  function curve(points) {
    const p = points.map(({x, y}) => [Math.round(x * 10) / 10, Math.round(y * 10) / 10]);
    if (p.length < 3) return "M" + p.map(q => q.join(",")).join("L");
    let path = "M" + p[0].join(",");
    for (let i = 1; i < p.length - 1; i += 1) {
      const last = i === p.length - 2;
      const end = last ? p[i + 1] : [(p[i][0] + p[i + 1][0]) / 2, (p[i][1] + p[i + 1][1]) / 2];
      path += "Q" + p[i].join(",") + " " + end.join(",");
    }
    return path;
  }

  return {HEADER, HIDDEN, decode, tree, firstOpen, chain, sources, layout, curve, isBox, textWidth};
})();
