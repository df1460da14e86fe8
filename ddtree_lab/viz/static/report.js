// The round-by-round view of the report: embedded JSON -> SVG and text. Text enters the page as text nodes only.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  if (!data.runs.length) return;
  const byId = (id) => document.getElementById(id);
  const prompts = byId("prompt"), runs = byId("run"), slider = byId("round"), tree = byId("tree");
  let run = 0, round = 0, chosen = 0;

  const running = (token) => data.running[token] ?? data.texts[token];
  let nodes = [];

  const drawTree = (view) => {
    nodes = drawnNodes(data, view);
    tree.replaceChildren(treeSvg(data, view, nodes, byId("status").textContent));
    revealPath(tree, data, nodes);
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
    byId("details").replaceChildren(...nodeDetails(data, view, nodes[index]));
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

  data.prompts.forEach((prompt, index) => prompts.append(make("option", { value: index }, prompt.title)));
  byId("legend").append(...legendItems(data));
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
    const index = neighbour(nodes, chosen, event.key);
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
