// Draws a round's tree and tells of its nodes: JSON of ddtree_lab.viz.payload -> SVG and elements. The report's page and
// the notebook's widget put this before their own script. Text enters the page as text nodes only.
const SVG = "http://www.w3.org/2000/svg";

const equip = (element, attributes, children) => {
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
};
const make = (name, attributes = {}, ...children) => equip(document.createElement(name), attributes, children);
const draw = (name, attributes = {}, ...children) => equip(document.createElementNS(SVG, name), attributes, children);
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

const probability = (milli, words) => (milli === null ? "–" : words(Math.exp(milli / 1000)));
const odds = (milli) =>
  probability(milli, (value) => (value < 0.001 ? "<0.001" : value.toFixed(value >= 0.1 ? 2 : 3)));
const share = (milli) =>
  probability(milli, (value) => (value >= 0.001 ? value.toFixed(4) : value.toExponential(1)));
const given = (view, node) => {
  const [own, parent] = [view.path[node], view.path[view.parents[node]]];
  return own === null || parent === null ? null : Math.min(0, own - parent);
};

// One drawn node per node of the tree, and the bonus token last, unless it is the token of a pruned node: then it is
// drawn there.
const drawnNodes = (data, view) => {
  const marks = Object.fromEntries(data.marks.map((mark) => [mark.letter, mark]));
  const words = (token) => ({ id: data.ids[token], full: data.texts[token], short: data.labels[token] ?? data.texts[token] });
  const nodes = view.tokens.map((token, node) => ({
    ...words(token), mark: marks[view.marks[node]], parent: view.parents[node], node,
    line: node ? `d ${odds(given(view, node))} · t ${odds(view.target[node])}` : "root",
  }));
  if (!view.marks.includes(data.bonus))
    nodes.push({
      ...words(view.next[view.end]), mark: marks[data.bonus], parent: view.end, node: null,
      line: `t ${odds(view.nextOdds[view.end])}`,
    });
  const size = data.geometry;
  nodes.forEach((item, index) => {
    item.left = size.margin + view.x[index];
    item.middle = size.margin + size.node_height / 2 + view.y[index];
  });
  return nodes;
};

const treeSvg = (data, view, nodes, label) => {
  const size = data.geometry;
  const width = Math.max(...view.x) + size.node_width + 2 * size.margin;
  const height = Math.max(...view.y) + size.node_height + 2 * size.margin;
  const clip = `clip-${Math.random().toString(36).slice(2)}`;
  const edges = draw("g", { "aria-hidden": "true" });
  const svg = draw("svg", { class: "ddtree", role: "group", "aria-label": label, width, height, viewBox: `0 0 ${width} ${height}` },
    draw("clipPath", { id: clip }, draw("rect", { x: 8, y: 0, width: size.node_width - 28, height: size.node_height })),
    edges);
  nodes.forEach(({ full, short, mark, parent, line, left, middle }, index) => {
    if (parent >= 0) {
      const [x0, y0] = [nodes[parent].left + size.node_width, nodes[parent].middle];
      const bend = (x0 + left) / 2;
      edges.append(draw("path", { class: `edge ${mark.name}`, d: `M${x0} ${y0}C${bend} ${y0} ${bend} ${middle} ${left} ${middle}` }));
    }
    const group = draw("g", {
      class: `node ${mark.name}`, role: "button", tabindex: -1, "data-index": index,
      transform: `translate(${left} ${middle - size.node_height / 2})`,
      "aria-label": `${full}, ${mark.meaning}, ${line}`,
    },
      draw("rect", { class: "ring", x: -3, y: -3, width: size.node_width + 6, height: size.node_height + 6, rx: 9 }),
      draw("rect", { class: "box", width: size.node_width, height: size.node_height, rx: 6 }));
    if (mark.name === "beyond")
      group.append(draw("rect", { class: "inner", x: 3, y: 3, width: size.node_width - 6, height: size.node_height - 6, rx: 4 }));
    group.append(
      draw("text", { class: "token", x: 9, y: 16, "clip-path": `url(#${clip})` }, short),
      draw("text", { class: "odds", x: 9, y: 29 }, line),
      draw("text", { class: "sign", x: size.node_width - 13, y: 17 }, mark.sign));
    svg.append(group);
  });
  return svg;
};

// Scrolls the way to the bonus token into the pane: all of it when it fits, its end otherwise.
const revealPath = (pane, data, nodes, scale = 1) => {
  const size = data.geometry;
  const last = nodes.findIndex((item) => item.mark.letter === data.bonus);
  const rows = [];
  for (let index = last; index > 0; index = nodes[index].parent) rows.push(nodes[index].middle * scale);
  const [top, bottom] = [Math.min(...rows), Math.max(...rows)];
  const fits = bottom - top < pane.clientHeight - size.node_height * scale;
  const right = (nodes[last].left + size.node_width + size.margin) * scale;
  const centre = fits ? (top + bottom) / 2 : nodes[last].middle * scale;
  pane.scrollTo(Math.max(0, right - pane.clientWidth), centre - pane.clientHeight / 2);
};

const nodeDetails = (data, view, { id, full, mark, parent, node }) => {
  const rows = [["Token id", id]];
  if (node !== null) {
    let depth = 0;
    for (let up = node; view.parents[up] >= 0; up = view.parents[up]) depth += 1;
    rows.push(["Node", node], ["Depth", depth]);
    if (node > 0) rows.push(
      ["Parent", parent],
      ["Drafter's rank", view.ranks[node]],
      ["Drafter, given parent", share(given(view, node))],
      ["Drafter, whole path", share(view.path[node])],
      ["Target's probability", share(view.target[node])],
      ["Target's rank", view.targetRanks[node]]);
    rows.push(["Target's next token", make("bdi", {}, data.texts[view.next[node]])], ["its probability", share(view.nextOdds[node])]);
  } else {
    rows.push(["After node", parent], ["Target's probability", share(view.nextOdds[parent])]);
  }
  const list = make("dl");
  for (const [term, value] of rows) list.append(make("dt", {}, term), make("dd", {}, value instanceof Node ? value : String(value)));
  return [
    make("h3", {}, make("bdi", {}, full)),
    make("p", {}, mark.sign ? `${mark.sign} ${mark.meaning}` : mark.meaning),
    list,
    ...(node === null ? [] : [make("p", { class: "note" }, "Rank 0 is the most probable token.")]),
  ];
};

// The drawn node that an arrow key leads to from node `from`, -1 when there is none.
const neighbour = (nodes, from, key) => {
  if (key === "ArrowLeft") return nodes[from].parent;
  const inColumn = nodes.map((item, index) => index).filter((index) =>
    key === "ArrowRight" ? nodes[index].parent === from : nodes[index].left === nodes[from].left);
  inColumn.sort((a, b) => nodes[a].middle - nodes[b].middle);
  if (key === "ArrowRight") return inColumn[0] ?? -1;
  return inColumn[inColumn.indexOf(from) + (key === "ArrowDown" ? 1 : -1)] ?? -1;
};

const legendItems = (data) => [
  ...data.marks.map((mark) => make("li", {},
    draw("svg", { class: "ddtree", viewBox: "0 0 24 16", "aria-hidden": "true" }, draw("g", { class: `node ${mark.name}` },
      draw("rect", { class: "box", x: 1, y: 1, width: 22, height: 14, rx: 4 }),
      draw("text", { class: "sign", x: 12, y: 13 }, mark.sign))), mark.meaning)),
  make("li", {}, data.oddsNote),
];
