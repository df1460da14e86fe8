// The widget's view: traits of ddtree_lab.viz.widget.TreeWidget -> a tree to browse, and the reader's doings back.
const PLAY_MS = 1200;
const READABLE = 0.75; // a new tree is shrunk to its pane down to this scale
const EDGE = 4; // pixels of a pane that are not for its tree
const [SMALLEST, LARGEST, ZOOM] = [0.04, 3, 1.25];
const KEYS = [
  ["Tab", "goes through the controls and into the tree."], ["Space", "plays and pauses,"], ["PgUp", ""], ["PgDn", "step,"],
  ["+", ""], ["−", "zoom,"], ["0", "fits. Outside the tree"], ["←", ""], ["→", ""], ["Home", ""],
  ["End", "choose the round; inside it the arrows go from node to node,"], ["Home", "to the root,"],
  ["End", "to the bonus token;"], ["Enter", "selects,"], ["Esc", "clears."],
];

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

const render = ({ model, el }) => {
  const run = model.get("_run");
  let view = null, data = null, nodes = [], scale = 1, zoom = "auto", timer = null, drag = null, due = false;

  const button = (label, text) => make("button", { type: "button", "aria-label": label, title: label }, text);
  const slider = (min, max) => make("input", { type: "range", min, max });
  const previous = button("Previous round", "‹"), play = button("Play", "▶"), next = button("Next round", "›");
  const out = button("Zoom out", "−"), into = button("Zoom in", "+"), fit = button("Fit the whole tree", "Fit");
  const rounds = slider(1, run.rounds), budget = slider(0, run.budget);
  const where = make("output"), kept = make("output");
  const status = make("p", { class: "status", role: "status", "aria-live": "polite" });
  const walk = make("dd"), linear = make("dd"), text = make("div", { class: "text", dir: "auto" });
  const pane = make("div", { class: "tree", role: "region", "aria-label": "Draft tree of this round" });
  const details = make("aside", { class: "details", "aria-label": "Details of the node" });
  const root = make("div", {
    class: "ddtree ddtree-browse ddtree-widget", role: "group", tabindex: -1, "aria-label": "Draft trees of a run, round by round",
    "data-lm-suppress-shortcuts": "true",
  },
    ...(run.name ? [make("p", { class: "name" }, make("bdi", {}, run.name))] : []),
    make("div", { class: "controls", role: "group", "aria-label": "Round, budget and zoom" },
      make("span", { class: "stepper" }, previous, play, next, make("label", { class: "slider" }, "Round", rounds), where),
      make("span", { class: "stepper" }, make("label", { class: "slider" }, "Budget", budget), kept),
      make("span", { class: "zoom" }, out, into, fit)),
    status,
    make("dl", { class: "verdicts" }, make("dt", {}, "Tree-walk"), walk, make("dt", {}, "EAGLE-linear"), linear),
    make("p", { class: "note" }, "Both replay this round alone. At another budget or by the other verifier the run would have " +
      "gone on from another token, so its later rounds would differ and these counts do not add up over rounds."),
    make("div", { class: "panes" }, pane, details),
    make("ul", { class: "legend", "aria-label": "Signs in the tree" }, ...legendItems(run)),
    make("p", { class: "note" }, "Text before this round, and what it adds by tree-walk:"), text,
    make("p", { class: "note keys" }, ...KEYS.flatMap(([key, use]) => [make("kbd", {}, key), ` ${use} `])));

  const send = (changes) => {
    for (const [name, value] of Object.entries(changes)) model.set(name, value);
    model.save_changes();
  };
  // Between a step and its answer the tree drawn is not the one that node numbers would be taken for.
  const inStep = () => view !== null && view.index === model.get("round_index");
  const step = (to) => {
    const index = clamp(to, 0, run.rounds - 1);
    if (index !== model.get("round_index")) send({ round_index: index, selected: null, hovered: null });
  };
  const stepBy = (by) => step(model.get("round_index") + by);
  const point = (index) => inStep() && index !== model.get("hovered") && send({ hovered: index });
  const select = (index) => inStep() && send({ selected: index === model.get("selected") ? null : index });
  const groupOf = (index) => pane.querySelector(`.node[data-index="${index}"]`);
  const bonusIndex = () => nodes.findIndex((item) => item.mark.letter === run.bonus);
  const isInView = (index) => {
    const [box, node] = [pane.getBoundingClientRect(), groupOf(index).getBoundingClientRect()];
    return node.left >= box.left && node.right <= box.right && node.top >= box.top && node.bottom <= box.bottom;
  };
  const hasFocus = () => pane.contains(root.getRootNode().activeElement);

  const playing = (on) => {
    clearInterval(timer);
    timer = on ? setInterval(() => {
      if (model.get("round_index") === run.rounds - 1) playing(false);
      else if (inStep()) stepBy(1);
    }, PLAY_MS) : null;
    const label = on ? "Pause" : "Play";
    play.textContent = on ? "❚❚" : "▶";
    equip(play, { "aria-label": label, title: label }, []);
    if (on && model.get("round_index") === run.rounds - 1) step(0);
  };

  const applyZoom = (svg = pane.querySelector("svg")) => {
    const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
    const whole = Math.min((pane.offsetWidth - EDGE) / width, (pane.offsetHeight - EDGE) / height);
    if (zoom === "fit") scale = clamp(whole, SMALLEST, 1);
    if (zoom === "auto") scale = clamp(whole, READABLE, 1);
    equip(svg, { width: width * scale, height: height * scale }, []);
  };
  // Zooms and keeps the point of the pane at (x, y) in place, its middle by default.
  const zoomBy = (factor, x = pane.clientWidth / 2, y = pane.clientHeight / 2) => {
    const before = scale;
    [zoom, scale] = ["own", clamp(scale * factor, SMALLEST, LARGEST)];
    applyZoom();
    const ratio = scale / before;
    pane.scrollTo((pane.scrollLeft + x) * ratio - x, (pane.scrollTop + y) * ratio - y);
  };
  const fitAll = () => {
    zoom = "fit";
    applyZoom();
  };

  const showPosition = () => {
    const index = model.get("round_index");
    rounds.value = index + 1;
    rounds.setAttribute("aria-valuetext", `Round ${index + 1} of ${run.rounds}`);
    where.textContent = `${index + 1} / ${run.rounds}`;
    previous.setAttribute("aria-disabled", String(index === 0)); // a button that is disabled would lose the focus
    next.setAttribute("aria-disabled", String(index === run.rounds - 1));
    budget.value = model.get("budget");
    budget.setAttribute("aria-valuetext", plural(model.get("budget"), "drafted node"));
    kept.textContent = `${model.get("budget")} / ${run.budget}`;
  };

  const showMarks = () => {
    const [selected, hovered] = [model.get("selected"), model.get("hovered")];
    const stop = nodes[hovered] ? hovered : nodes[selected] ? selected : bonusIndex();
    for (const group of pane.querySelectorAll(".node")) {
      const index = Number(group.dataset.index);
      group.classList.toggle("chosen", index === selected);
      group.classList.toggle("pointed", index === hovered);
      group.setAttribute("aria-pressed", String(index === selected));
      group.setAttribute("tabindex", index === stop ? 0 : -1);
    }
    const shown = nodes[hovered] ?? nodes[selected];
    details.replaceChildren(...(shown ? nodeDetails(data, view, shown)
      : [make("p", {}, "Point at a node for its details, click it to keep them here.")]));
  };

  const showVerdicts = () => {
    const chip = (word, mark, meaning) => make("bdi", { class: `chip ${mark}`, title: meaning }, word);
    const chips = (accepted, linearly) => view.emitted.slice(0, accepted + 1).map((word, index) =>
      index === accepted ? chip(word, "bonus", "bonus token")
        : index < linearly ? chip(word, "kept", "accepted") : chip(word, "beyond", "lost by EAGLE-linear"));
    const tokens = (count) => make("strong", {}, plural(count, "token"));
    const linearTokens = Math.min(view.linear + 1, view.emitted.length);
    walk.replaceChildren(tokens(view.emitted.length), ...chips(view.accepted, view.linear));
    linear.replaceChildren(tokens(linearTokens), ...chips(view.linear, view.linear),
      ...(view.lost ? [make("span", { class: "lost" }, `${plural(view.lost, "token")} lost`)] : []));
    status.textContent = `Round ${view.index + 1} of ${run.rounds}, ${view.budget} of ${plural(view.tokens.length - 1, "drafted node")}. ` +
      `${view.words.replaceAll("\n", " ")} The run itself kept ${plural(view.kept, "token")} here.`;
    const running = (token) => data.running[token] ?? data.texts[token];
    text.replaceChildren(view.before.map(running).join(""),
      ...view.emitted.map((word, index) => make("mark", index < view.accepted ? {} : { class: "bonus" }, word)));
  };

  const show = () => {
    const [round, outcome] = [model.get("_round"), model.get("_outcome")];
    if (round.index !== outcome.index) return;
    const moved = round.index !== view?.index, focused = hasFocus(), { scrollLeft, scrollTop } = pane;
    data = { ...run, ...round.table };
    view = { ...round, ...outcome };
    nodes = drawnNodes(data, view);
    showPosition();
    showVerdicts();
    const svg = treeSvg(data, view, nodes, status.textContent);
    applyZoom(svg);
    pane.replaceChildren(svg);
    pane.scrollTo(scrollLeft, scrollTop);
    if (moved || !isInView(bonusIndex())) revealPath(pane, data, nodes, scale);
    showMarks();
    if (focused) pane.querySelector('.node[tabindex="0"]').focus({ preventScroll: moved });
  };
  // A round and its outcome change together, and are drawn once.
  const showSoon = () => {
    if (due) return;
    due = true;
    queueMicrotask(() => {
      due = false;
      show();
    });
  };

  const onKey = (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const { key, target } = event, group = target.closest(".node");
    const general = {
      " ": target.matches("button") ? null : () => playing(timer === null),
      "+": () => zoomBy(ZOOM), "=": () => zoomBy(ZOOM), "-": () => zoomBy(1 / ZOOM), 0: fitAll,
      PageUp: () => stepBy(-1), PageDown: () => stepBy(1),
    };
    const elsewhere = target.matches("input") ? {} : {
      ArrowLeft: () => stepBy(-1), ArrowRight: () => stepBy(1), Home: () => step(0), End: () => step(run.rounds - 1),
    };
    const focus = (index) => index >= 0 && groupOf(index).focus();
    const arrow = key.startsWith("Arrow") && { [key]: () => focus(neighbour(nodes, Number(group.dataset.index), key)) };
    const inTree = group && {
      ...arrow, Home: () => focus(0), End: () => focus(bonusIndex()), Enter: () => select(Number(group.dataset.index)),
      Escape: () => inStep() && send({ selected: null, hovered: null }),
    };
    const act = { ...elsewhere, ...general, ...inTree }[key];
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  };
  const nodeAt = (event) => event.target.closest(".node")?.dataset.index;
  const pointAt = (event) => point(nodeAt(event) === undefined ? null : Number(nodeAt(event)));

  previous.addEventListener("click", () => stepBy(-1));
  next.addEventListener("click", () => stepBy(1));
  play.addEventListener("click", () => playing(timer === null));
  rounds.addEventListener("input", () => step(Number(rounds.value) - 1));
  budget.addEventListener("input", () => send({ budget: Number(budget.value) }));
  into.addEventListener("click", () => zoomBy(ZOOM));
  out.addEventListener("click", () => zoomBy(1 / ZOOM));
  fit.addEventListener("click", fitAll);
  root.addEventListener("keydown", onKey);
  pane.addEventListener("pointerover", (event) => drag?.moved || pointAt(event));
  pane.addEventListener("pointerleave", () => point(null));
  pane.addEventListener("focusin", pointAt);
  pane.addEventListener("click", (event) => nodeAt(event) === undefined || select(Number(nodeAt(event))));
  pane.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const box = pane.getBoundingClientRect();
    zoomBy(Math.exp(-event.deltaY / 300), event.clientX - box.left, event.clientY - box.top);
  }, { passive: false });
  pane.addEventListener("pointerdown", (event) => {
    if (event.button === 0 && event.pointerType === "mouse")
      drag = { x: event.clientX, y: event.clientY, left: pane.scrollLeft, top: pane.scrollTop, moved: false };
  });
  pane.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
    if (!drag.moved && Math.hypot(dx, dy) < 5) return;
    if (!drag.moved) pane.setPointerCapture(event.pointerId); // the click that ends a drag is then the pane's, no node's
    drag.moved = true;
    pane.scrollTo(drag.left - dx, drag.top - dy);
  });
  for (const kind of ["pointerup", "pointercancel"]) pane.addEventListener(kind, () => { drag = null; });

  const heard = [
    ["change:_round", showSoon], ["change:_outcome", showSoon], ["change:round_index", showPosition],
    ["change:budget", showPosition], ["change:selected", showMarks], ["change:hovered", showMarks],
  ];
  for (const [name, handler] of heard) model.on(name, handler);
  // A pane has no size before it is in the page, and another when the page changes its width.
  const resized = new ResizeObserver(() => {
    if (zoom === "own" || !pane.offsetWidth) return;
    applyZoom();
    revealPath(pane, data, nodes, scale);
  });
  el.replaceChildren(root);
  show();
  resized.observe(pane, { box: "border-box" }); // scroll bars come and go with what is drawn
  return () => {
    clearInterval(timer);
    resized.disconnect();
    for (const [name, handler] of heard) model.off(name, handler);
  };
};

export default { render };
