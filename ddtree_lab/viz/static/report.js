"use strict";
// The round-by-round view of the report: embedded JSON -> SVG and text. Text enters the page as text nodes only.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  if (!data.runs.length) return;
  const SVG = "http://www.w3.org/2000/svg";
  const size = data.geometry;
  const byId = (id) => document.getElementById(id);
  const prompts = byId("prompt"), runs = byId("run"), slider = byId("round"), tree = byId("tree");
  let run = 0, round = 0, chosen = 0;

  const make = (name, attributes = {}, ...children) => {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  };
  const draw = (name, attributes = {}, ...children) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  };
  const full = (token) => data.texts[token];
  const short = (token) => data.labels[token] ?? data.texts[token];
  const running = (token) => data.running[token] ?? data.texts[token];
  const marks = Object.fromEntries(data.marks.map((mark) => [mark.letter, mark]));
  const odds = (milli) => {
    if (milli === null) return "–";
    const value = Math.exp(milli / 1000);
    return value < 0.001 ? "<0.001" : value.toFixed(value >= 0.1 ? 2 : 3);
  };
  const share = (milli) => {
    if (milli === null) return "–";
    const value = Math.exp(milli / 1000);
    return value >= 0.001 ? value.toFixed(4) : value.toExponential(1);
  };
  const given = (view, node) => {
    const [own, parent] = [view.path[node], view.path[view.parents[node]]];
    return own === null || parent === null ? null : Math.min(0, own - parent);
  };

  // One node of the drawing per node of the tree, and the bonus token last.
  const nodes = (view) => {
    const drawn = view.tokens.map((token, node) => ({
      token, mark: marks[view.marks[node]], parent: view.parents[node], node,
      line: node ? `d ${odds(given(view, node))} · t ${odds(view.target[node])}` : "root",
    }));
    const end = view.end;
    drawn.push({ token: view.next[end], mark: marks[data.bonus], parent: end, node: null, line: `t ${odds(view.nextOdds[end])}` });
    return drawn;
  };

  const drawTree = (view) => {
    const drawn = nodes(view);
    const left = view.x.map((x) => size.margin + x);
    const middle = view.y.map((y) => size.margin + size.node_height / 2 + y);
    const width = Math.max(...view.x) + size.node_width + 2 * size.margin;
    const height = Math.max(...view.y) + size.node_height + 2 * size.margin;
    const svg = draw("svg", { class: "ddtree", role: "group", width, height, viewBox: `0 0 ${width} ${height}` });
    svg.setAttribute("aria-label", byId("status").textContent);
    svg.append(draw("clipPath", { id: "clip" },
      draw("rect", { x: 8, y: 0, width: size.node_width - 28, height: size.node_height })));
    const edges = draw("g", { "aria-hidden": "true" });
    svg.append(edges);
    drawn.forEach(({ token, mark, parent, line }, index) => {
      if (parent >= 0) {
        const [x0, y0, x1, y1] = [left[parent] + size.node_width, middle[parent], left[index], middle[index]];
        const bend = (x0 + x1) / 2;
        edges.append(draw("path", { class: `edge ${mark.name}`, d: `M${x0} ${y0}C${bend} ${y0} ${bend} ${y1} ${x1} ${y1}` }));
      }
      const group = draw("g", {
        class: `node ${mark.name}`, role: "button", tabindex: -1, "data-index": index,
        transform: `translate(${left[index]} ${middle[index] - size.node_height / 2})`,
        "aria-label": `${full(token)}, ${mark.meaning}, ${line}`,
      });
      group.append(
        draw("rect", { class: "ring", x: -3, y: -3, width: size.node_width + 6, height: size.node_height + 6, rx: 9 }),
        draw("rect", { class: "box", width: size.node_width, height: size.node_height, rx: 6 }));
      if (mark.name === "beyond")
        group.append(draw("rect", { class: "inner", x: 3, y: 3, width: size.node_width - 6, height: size.node_height - 6, rx: 4 }));
      group.append(
        draw("text", { class: "token", x: 9, y: 16, "clip-path": "url(#clip)" }, short(token)),
        draw("text", { class: "odds", x: 9, y: 29 }, line),
        draw("text", { class: "sign", x: size.node_width - 13, y: 17 }, mark.sign));
      svg.append(group);
    });
    tree.replaceChildren(svg);
    // Bring the accepted path into view: all of it when it fits, its end otherwise.
    const path = [];
    for (let node = drawn.length - 1; node > 0; node = drawn[node].parent) path.push(node);
    const [top, bottom] = [Math.min(...path.map((node) => middle[node])), Math.max(...path.map((node) => middle[node]))];
    const fits = bottom - top < tree.clientHeight - size.node_height;
    const right = left[drawn.length - 1] + size.node_width + size.margin;
    tree.scrollTo(Math.max(0, right - tree.clientWidth), (fits ? (top + bottom) / 2 : middle[drawn.length - 1]) - tree.clientHeight / 2);
  };

  const showDetails = (view, index) => {
    const { token, mark, parent, node } = nodes(view)[index];
    const rows = [["Token id", data.ids[token]]];
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
      rows.push(["Target's next token", make("bdi", {}, full(view.next[node]))], ["its probability", share(view.nextOdds[node])]);
    } else {
      rows.push(["After node", parent], ["Target's probability", share(view.nextOdds[parent])]);
    }
    const list = make("dl");
    for (const [term, value] of rows) list.append(make("dt", {}, term), make("dd", {}, value instanceof Node ? value : String(value)));
    byId("details").replaceChildren(
      make("h3", {}, make("bdi", {}, full(token))),
      make("p", {}, mark.sign ? `${mark.sign} ${mark.meaning}` : mark.meaning),
      list,
      ...(node === null ? [] : [make("p", { class: "note" }, "Rank 0 is the most probable token.")]));
  };

  const choose = (index, { focus = false } = {}) => {
    const view = data.runs[run].rounds[round];
    chosen = index;
    for (const group of tree.querySelectorAll(".node")) {
      const here = Number(group.dataset.index) === index;
      group.classList.toggle("chosen", here);
      group.setAttribute("tabindex", here ? 0 : -1);
      group.setAttribute("aria-pressed", String(here));
      if (here && focus) group.focus();
    }
    showDetails(view, index);
  };

  const showText = () => {
    const { rounds, before } = data.runs[run];
    const old = [...before, ...rounds.slice(0, round).flatMap((view) => view.emitted)];
    const view = rounds[round];
    const accepted = view.accepted;
    byId("text").replaceChildren(
      old.map(running).join(""),
      ...view.emitted.map((token, index) =>
        make("mark", index < accepted ? { title: "accepted" } : { class: "bonus", title: "bonus token" }, running(token))));
    byId("text").scrollTop = byId("text").scrollHeight;
  };

  const statusLine = (view) => {
    const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
    const lost = view.lost ? `, which loses ${plural(view.lost, "token")}` : "";
    const cut = view.emitted.length < view.accepted + 1 ? " (cut by a stop token or the length cap)" : "";
    return `${plural(view.tokens.length - 1, "drafted node")} after ${view.past + 1} committed tokens. ` +
      `Accepted: ${view.accepted}; EAGLE-linear on the same tree: ${view.linear}${lost}. ` +
      `Emitted: ${plural(view.emitted.length, "token")}${cut}.`;
  };

  const show = () => {
    const { rounds } = data.runs[run];
    const view = rounds[round];
    slider.max = rounds.length;
    slider.value = round + 1;
    slider.setAttribute("aria-valuetext", `Round ${round + 1} of ${rounds.length}`);
    byId("where").textContent = `${round + 1} / ${rounds.length}`;
    byId("previous").disabled = round === 0;
    byId("next").disabled = round === rounds.length - 1;
    byId("status").textContent = statusLine(view);
    drawTree(view);
    choose(view.end);
    showText();
  };

  const fillRuns = () => {
    const prompt = data.runs[run].prompt;
    runs.replaceChildren(...data.runs.flatMap((item, index) =>
      item.prompt === prompt ? [make("option", { value: index }, item.name)] : []));
    runs.value = String(run);
    prompts.value = String(prompt);
    byId("prompt-text").textContent = data.prompts[prompt].text;
  };

  const open = (newRun, newRound) => {
    run = newRun;
    round = Math.max(0, Math.min(newRound, data.runs[run].rounds.length - 1));
    fillRuns();
    show();
  };
  const step = (by) => {
    const target = round + by;
    if (target >= 0 && target < data.runs[run].rounds.length) open(run, target);
  };
  const followHash = () => {
    const match = /^#run-(\d+)-round-(\d+)$/.exec(location.hash);
    if (!match || !data.runs[Number(match[1])]) return false;
    open(Number(match[1]), Number(match[2]) - 1);
    byId("browser").scrollIntoView();
    return true;
  };

  const neighbour = (key) => {
    const view = data.runs[run].rounds[round];
    const parents = [...view.parents, view.end];
    if (key === "ArrowLeft") return parents[chosen];
    const near = view.x.map((x, index) => index).filter((index) =>
      key === "ArrowRight" ? parents[index] === chosen : view.x[index] === view.x[chosen]);
    near.sort((a, b) => view.y[a] - view.y[b]);
    if (key === "ArrowRight") return near[0] ?? -1;
    return near[near.indexOf(chosen) + (key === "ArrowDown" ? 1 : -1)] ?? -1;
  };

  data.prompts.forEach((prompt, index) => prompts.append(make("option", { value: index }, prompt.title)));
  for (const mark of data.marks)
    byId("legend").append(make("li", {},
      draw("svg", { class: "ddtree", viewBox: "0 0 24 16", "aria-hidden": "true" }, draw("g", { class: `node ${mark.name}` },
        draw("rect", { class: "box", x: 1, y: 1, width: 22, height: 14, rx: 4 }),
        draw("text", { class: "sign", x: 12, y: 13 }, mark.sign))), mark.meaning));
  byId("legend").append(make("li", {}, data.oddsNote));
  byId("fit").addEventListener("change", () => {
    tree.classList.toggle("fit", byId("fit").checked);
    show();
  });
  prompts.addEventListener("change", () => {
    const name = data.runs[run].name, prompt = Number(prompts.value);
    const own = data.runs.flatMap((item, index) => (item.prompt === prompt ? [index] : []));
    open(own.find((index) => data.runs[index].name === name) ?? own[0], 0);
  });
  runs.addEventListener("change", () => open(Number(runs.value), 0));
  slider.addEventListener("input", () => open(run, Number(slider.value) - 1));
  byId("previous").addEventListener("click", () => step(-1));
  byId("next").addEventListener("click", () => step(1));
  for (const kind of ["mouseover", "click", "focusin"])
    tree.addEventListener(kind, (event) => {
      const group = event.target.closest(".node");
      if (group && Number(group.dataset.index) !== chosen) choose(Number(group.dataset.index));
    });
  tree.addEventListener("keydown", (event) => {
    if (!event.target.closest(".node")) return;
    if (event.key === "Escape") slider.focus();
    if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
    event.stopPropagation();
    const index = neighbour(event.key);
    if (index >= 0) choose(index, { focus: true });
  });
  document.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const elsewhere = event.target !== document.body && !byId("browser").contains(event.target);
    if (!by || event.altKey || event.ctrlKey || event.metaKey || elsewhere || event.target.matches("input, select")) return;
    event.preventDefault();
    step(by);
  });
  window.addEventListener("hashchange", followHash);
  byId("viewer").hidden = false;
  if (!followHash()) open(0, 0);
})();
