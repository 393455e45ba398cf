"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const runs = data.runs, several = runs.length > 1;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const COLOURS = { light: ["#2563eb", "#ea7317", "#12936f", "#8b3fc7", "#c81e4a", "#0e8fa8", "#8a6d1b", "#52606d"],
                    dark: ["#7aa7ff", "#ff9d57", "#4cc9a0", "#c79bff", "#ff7d9c", "#55cbe0", "#dcbd62", "#a9b5c1"] };
  const colour = (i) => COLOURS[dark.matches ? "dark" : "light"][i % 8];
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const $ = (id) => document.getElementById(id);

  // Every text reaches the page as a text node: nothing of a run is ever read as HTML.
  function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value === true) node.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }

  function number(x, digits = 4) {
    if (x === null || x === undefined) return "–";
    if (typeof x === "string") return x;
    if (Number.isInteger(x) && Math.abs(x) < 1e15) return x.toLocaleString("en");
    const size = Math.abs(x);
    return size >= 1e5 || size < 1e-3 ? x.toExponential(2) : String(+x.toPrecision(digits));
  }
  const percent = (x) => (x === null || x === undefined ? "–" : (100 * x).toFixed(1) + " %");
  function brief(x, digits = 3) {
    const size = Math.abs(x);
    for (const [unit, word] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (size >= unit) return +(x / unit).toPrecision(digits) + word;
    return number(x, digits);
  }
  function duration(seconds) {
    if (seconds < 120) return number(seconds, 3) + " s";
    return seconds < 7200 ? (seconds / 60).toFixed(1) + " min" : (seconds / 3600).toFixed(1) + " h";
  }
  const finite = (x) => (typeof x === "number" ? x : null);
  const column = (run, name) => (run.metrics[name] || []).map(finite);
  const has = (run, name) => column(run, name).some((x) => x !== null);
  const finites = (run, name) => column(run, name).filter((x) => x !== null);

  // The x axis ---------------------------------------------------------------------------------

  const state = { axis: "step", smooth: 0, added: [] };
  function carried(values) { let last = 0; return values.map((x) => (last = x === null ? last : x)); }
  // Of a run without a clock. Lines that were left out took the time of their neighbours.
  function steppingMinutes(run) {
    let sum = 0, before = null;
    const taken = column(run, "perf/time_per_step");
    return run.steps.map((step, i) => { if (taken[i] !== null) sum += taken[i] * (before === null ? 1 : step - before); before = step; return sum / 60; });
  }
  const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9].flatMap((unit) => [unit, 2 * unit, 5 * unit]);
  const AXES = {
    step: { word: "step", of: (run) => run.steps },
    tokens: { word: "tokens trained on", of: (run) => carried(has(run, "training/total_tokens") ? column(run, "training/total_tokens") : run.steps.map(() => null)) },
    time: { word: "minutes of the run", of: (run) => (has(run, "perf/run_minutes") ? carried(column(run, "perf/run_minutes")) : steppingMinutes(run)) },
  };

  function buttons(parent, choices, current, choose) {
    const group = el("span", { class: "group" });
    for (const [key, word, disabled] of choices)
      group.append(el("button", { type: "button", "data-key": key, disabled, "aria-pressed": String(key === current), onclick: () => {
        for (const button of group.children) button.setAttribute("aria-pressed", String(button.dataset.key === key));
        choose(key);
      } }, word));
    parent.append(group);
  }

  // Charts -------------------------------------------------------------------------------------

  let charts = [];
  const watcher = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const chart = charts.find((c) => c.box === target), width = Math.floor(target.clientWidth);
      if (chart && width && chart.plot.width !== width) chart.plot.setSize({ width, height: chart.plot.height });
    }
  });

  function smoothed(values, width) {
    if (!width) return values;
    const reach = 2 * width, deviation = width / 2;
    return values.map((own, i) => {
      if (own === null) return null;
      let sum = 0, weights = 0;
      for (let j = Math.max(0, i - reach); j <= Math.min(values.length - 1, i + reach); j++) {
        if (values[j] === null) continue;
        const weight = Math.exp(-0.5 * ((i - j) / deviation) ** 2);
        sum += weight * values[j]; weights += weight;
      }
      return sum / weights;
    });
  }

  function axes(spec, axis) {
    const font = "12px system-ui, sans-serif";
    const wide = (u, words) => Math.max(54, 18 + 7 * Math.max(0, ...(words ?? []).map((word) => word.length)));
    const common = { stroke: css("--muted"), font, grid: { stroke: css("--line"), width: 1 }, ticks: { show: false } };
    return [
      { ...common, label: AXES[axis].word, labelFont: font, labelSize: 18, size: 28, ...(axis === "time" ? {} : { incrs: WHOLE }), values: (u, ticks) => ticks.map((x) => (x === null ? "" : brief(x))) },
      { ...common, size: wide, values: (u, ticks) => ticks.map((x) => (x === null ? "" : spec.percent ? +(100 * x).toPrecision(4) + "%" : brief(x, 6))) },
    ];
  }

  const ROUNDING = 1e-5;
  let rounded = [];

  /* spec: title, unit, definition, lines [{metric, label}], measured, bounds, lowest, percent, axis */
  function chart(parent, spec, close) {
    const axis = spec.axis || state.axis;
    if (spec.lines.every((line) => (data.metrics[line.metric] || {}).rounding)) {
      const sizes = runs.flatMap((run) => spec.lines.flatMap((line) => finites(run, line.metric))).map(Math.abs);
      if (sizes.length) rounded.push(`${spec.title} (at most ${number(Math.max(...sizes), 2)}${spec.unit ? " " + spec.unit : ""})`);
      return;
    }
    const tables = [], series = [{ label: AXES[axis].word, value: (u, x) => (x === null ? "–" : number(x)) }];
    runs.forEach((run, r) => spec.lines.forEach((line, l) => {
      if (!has(run, line.metric)) return;
      const raw = column(run, line.metric), x = AXES[axis].of(run);
      // Several lines may lie on one place of the tokens' axis; the last of them stands there.
      const last = new Map(x.map((at, i) => [at, i]));
      const rows = [...last.values()].filter((i) => raw[i] !== null);
      const y = spec.measured ? rows.map((i) => raw[i]) : smoothed(rows.map((i) => raw[i]), state.smooth);
      tables.push([rows.map((i) => x[i]), y]);
      const one = rows.length === 1;
      series.push({
        label: [several ? run.name : null, several && spec.lines.length === 1 ? null : line.label].filter(Boolean).join(" "),
        stroke: colour(several ? r : l), width: 2, dash: several && l ? [6, 4] : undefined, spanGaps: true,
        points: { show: spec.measured || one, size: 6, fill: css("--card") },
        value: (u, x) => (x === null || x === undefined ? "–" : spec.percent ? percent(x) : number(x)),
      });
    }));
    if (!tables.length) return;
    const [low, high] = spec.bounds || [null, null];
    const box = el("div");
    parent.append(el("div", { class: "card chart", "data-title": spec.title },
      el("h3", {}, spec.title), el("p", { class: "unit" }, [spec.unit, spec.definition].filter(Boolean).join(" · ")),
      close ? el("button", { class: "close", type: "button", "aria-label": "remove " + spec.title, onclick: close }, "×") : null, box));
    const range = (u, least, most) => {
      if (least === null) return [0, 1];
      if (typeof spec.lowest === "number") least = Math.max(least, spec.lowest);
      least = low === null ? least : low; most = high === null ? most : high;
      // A range of rounding is the range of a constant.
      const isConstant = most - least <= ROUNDING * Math.max(Math.abs(most), Math.abs(least));
      const room = (isConstant ? 0 : (most - least) * 0.06) || Math.abs(most) * 0.1 || 0.1;
      return [least - room * (low === null ? 1 : 0.4), most + room * (high === null ? 1 : 0.4)];
    };
    // uPlot gives one point the range from 0 to 100.
    const across = (u, least, most) => { const [at, ...more] = u.data[0]; return more.length ? [least, most] : [Math.max(0, at - 1), at + 1]; };
    mount(box, { axes: axes(spec, axis), series, scales: { x: { time: false, range: across }, y: { range } } }, uPlot.join(tables), axis);
  }

  function mount(box, options, table, axis) {
    const width = Math.max(200, Math.floor(box.clientWidth)), height = 230;
    const plot = new uPlot({ width, height, cursor: { sync: { key: "runs of " + axis }, focus: { prox: 24 } }, ...options }, table, box);
    box.plot = plot;
    charts.push({ plot, box });
    watcher.observe(box);
  }

  const stated = (name) => { const known = data.metrics[name] || { definition: "of the recipe's own", unit: "" };
    return { title: name, unit: known.unit === "1" ? "" : known.unit, definition: known.definition, lines: [{ metric: name, label: name }], percent: known.unit === "fraction", bounds: known.unit === "fraction" && runs.every((run) => column(run, name).every((x) => x === null || x >= 0)) ? [0, null] : null, measured: name.startsWith("val/") }; };
  const ROUTER = [
    data.panels.find((panel) => panel.file === "router_load"),
    ...[["moe/router_entropy", "Router entropy"], ["moe/load_balancing_loss", "Load-balancing loss"], ["moe/z_loss", "Router z-loss"],
        ["moe/dropped_fraction", "Choices beyond capacity"], ["moe/replay_agreement", "Agreement with replayed experts"],
        ["sampling/routing_agreement", "Agreement with the sampler's experts"]].map(([name, title]) => ({ ...stated(name), title })),
  ];
  const MORE = [["critic/advantages/mean", "Advantage"], ["actor/grad_norm", "Gradient norm"], ["sampling/k3_kl", "Sampler against trainer"],
                ["response_length/clip_ratio", "Cut at the length limit"], ["frac_reward_zero_std", "Groups of one reward"]]
    .map(([name, title]) => ({ ...stated(name), title }));

  const SCORE = { title: "Held-out score", unit: "mean score", lines: ["sampled", "greedy"].map((mode) => ({ metric: "val/score/" + mode, label: mode })), measured: true };
  const hasScore = (run) => ["sampled", "greedy"].some((mode) => { const full = column(run, "val/accuracy/" + mode); return column(run, "val/score/" + mode).some((x, i) => x !== null && Math.abs(x - full[i]) > ROUNDING); });
  const MEMORY = { title: "Memory", unit: "GiB", lines: [{ metric: "perf/process_memory_gb", label: "process" }, { metric: "perf/max_memory_allocated_gb", label: "device, peak" }], bounds: [0, null] };
  const overMinutes = (panel) => ({ ...panel, title: panel.title + " over minutes", axis: "time" });

  function drawCharts() {
    rounded = [];
    for (const { plot, box } of charts) { watcher.unobserve(box); plot.destroy(); }
    charts = [];
    for (const id of ["charts", "router-charts", "time-charts"]) $(id).replaceChildren();
    for (const panel of data.panels) {
      if (panel.file === "router_load") continue;
      chart($("charts"), panel);
      if (panel.file !== "accuracy" && panel.file !== "token_accuracy") continue;
      if (state.axis !== "time") chart($("charts"), overMinutes(panel));
      if (panel.file === "accuracy" && runs.some(hasScore)) chart($("charts"), SCORE);
    }
    for (const spec of MORE) chart($("charts"), spec);
    for (const name of state.added) chart($("charts"), stated(name), () => { state.added = state.added.filter((other) => other !== name); drawCharts(); });
    for (const spec of ROUTER) chart($("router-charts"), spec);
    for (const part of [$("router"), document.querySelector("nav [href='#router']")]) part.hidden = !$("router-charts").children.length;
    drawTime();
    $("rounding").hidden = !rounded.length;
    $("rounding").textContent = `Differences of rounding alone: ${rounded.join(", ")}.`;
    $("legend").replaceChildren(...(several ? runs.map((run, r) => el("span", {}, el("i", { class: "swatch", style: `background:${colour(r)}` }), run.name)) : []));
  }

  // Time ---------------------------------------------------------------------------------------

  const WORDS = { gen: "sampling", reward: "verdicts", values: "critic's values", ref: "reference policy", old_log_prob: "scoring again", adv: "advantages",
                  update_actor: "policy's updates", update_critic: "critic's updates", wait_for_rollout: "waiting for the sampler", other: "everything else" };
  function phases(run) {
    const found = Object.keys(run.metrics).filter((name) => name.startsWith("timing_s/") && name !== "timing_s/testing").map((name) => ({
      word: WORDS[name.slice(9)] || name.slice(9), values: column(run, name).map((x) => x || 0) }));
    const whole = column(run, "perf/time_per_step");
    const rest = whole.map((x, i) => Math.max(0, (x || 0) - found.reduce((sum, phase) => sum + phase.values[i], 0)));
    return [...found, { word: WORDS.other, values: rest }].map((phase) => ({ ...phase, total: phase.values.reduce((a, b) => a + b, 0) }))
      .filter((phase) => phase.total > 0).sort((a, b) => b.total - a.total);
  }

  function drawTime() {
    for (const [name, title] of [["perf/time_per_step", "Time per step"], ["perf/tokens_per_second", "Tokens per second"], ["perf/slot_utilisation", "Use of the sampler's slots"]])
      chart($("time-charts"), { ...stated(name), title });
    chart($("time-charts"), MEMORY);
    $("phases").replaceChildren(...runs.map((run) => {
      const found = phases(run), all = found.reduce((sum, phase) => sum + phase.total, 0);
      const steps = column(run, "perf/time_per_step").filter((x) => x !== null).length;
      if (!all) return el("p", { class: "note" }, `${several ? run.name + ": n" : "N"}o step was timed.`);
      const evaluating = finites(run, "timing_s/testing").reduce((a, b) => a + b, 0);
      return el("div", { class: "card scroll phases" }, el("h3", {}, several ? `${run.name}: where a step's time goes` : "Where a step's time goes"),
        el("div", { class: "stack", "aria-hidden": "true" }, ...found.map((phase, i) => el("i", { style: `width:${100 * phase.total / all}%;background:${colour(i)}`, title: phase.word }))),
        el("table", {}, el("tbody", {}, el("tr", {}, el("th", {}, "phase"), el("th", { class: "number" }, "mean, seconds a step"), el("th", { class: "number" }, "share")),
          ...found.map((phase, i) => el("tr", {}, el("td", {}, el("i", { class: "swatch", style: `background:${colour(i)}` }), phase.word),
            el("td", { class: "number" }, number(phase.total / steps, 3)), el("td", { class: "number" }, percent(phase.total / all)))))),
        evaluating ? el("p", { class: "note" }, `Evaluations came on top: ${duration(evaluating)} together.`) : null);
    }));
  }

  function drawProfiles() {
    $("profiles").replaceChildren(...runs.flatMap((run) => run.profiles.map((found) => el("div", { class: "card scroll phases" },
      el("h3", {}, `${several ? run.name + ": l" : "L"}argest operations of ${found.first === found.last ? `step ${found.first}` : `steps ${found.first} to ${found.last}`}${found.process ? `, process ${found.process}` : ""}`),
      found.operations.length ? el("table", {}, el("tbody", {}, el("tr", {}, el("th", {}, "operation"), el("th", {}, "program"), el("th", { class: "number" }, "seconds a step"), el("th", { class: "number" }, "share")),
        ...found.operations.map((one) => el("tr", {}, el("td", {}, one.name), el("td", {}, one.program),
          el("td", { class: "number" }, number(one.seconds / (found.last - found.first + 1), 3)), el("td", { class: "number" }, percent(one.seconds / found.seconds))))))
        : el("p", {}, "The trace names no operation."),
      el("p", { class: "note" }, "Time of all devices and threads together. ", found.trace ? el("a", { href: found.trace, download: true }, "Trace") : null, found.trace ? " for ui.perfetto.dev; TensorBoard reads profiles/ of the run folder." : null)))));
  }

  // Summary ------------------------------------------------------------------------------------

  function figures(run) {
    const found = [], add = (word, value) => found.push([word, value]);
    const change = (word, name, form) => { const all = finites(run, name); if (all.length) add(word, all.length > 1 ? `${form(all[0])} → ${form(all.at(-1))}` : form(all[0])); };
    const share = (x) => (100 * x).toFixed(1) + "%";
    change("held-out accuracy, sampled", "val/accuracy/sampled", share);
    change("held-out accuracy, greedy", "val/accuracy/greedy", share);
    if (hasScore(run)) change("held-out score, sampled", "val/score/sampled", (x) => number(x, 3));
    change("held-out loss, nats a token", "val/nll", (x) => number(x, 3));
    change("held-out tokens right", "val/token_accuracy", share);
    change("mean score", "critic/score/mean", (x) => number(x, 3));
    change("response length, tokens", "response_length/mean", (x) => number(x, 3));
    const planned = (run.config.run || {}).steps, done = run.steps.at(-1) ?? 0;
    add("steps", planned > done ? `${number(done)} of ${number(planned)}` : number(done));
    const tokens = finites(run, "training/total_tokens");
    if (tokens.length) add("tokens trained on", brief(tokens.at(-1)));
    const time = AXES.time.of(run).at(-1);
    if (time) add("time", duration(60 * time));
    const skipped = finites(run, "training/nonfinite_skipped_total").at(-1);
    if (skipped) add("updates skipped, not finite", number(skipped));
    return found;
  }

  function drawSuspicion() {
    const found = runs.filter((run) => run.suspicion);
    $("suspicion").replaceChildren(...found.map((run) => el("div", { class: "card warning", role: "note" },
      el("b", {}, `${several ? run.name + ": s" : "S"}uspicious at step ${number(run.suspicion.step)}`),
      ...run.suspicion.reasons.map((reason) => el("p", {}, reason + ".")),
      ...run.samples.filter((sample) => sample.kind === "suspicious").slice(0, SUSPICIOUS).map((sample) => el("p", { class: "said" },
        el("span", { class: "note" }, sample.prompt), el("br"), sample.completion, el("span", { class: "note" }, ` score ${number(sample.score, 3)}, gold answer ${sample.answer}`))),
      el("p", { class: "note" }, "Does the policy do what you want, or has it found what the verifier overlooks?"))),
      ...runs.filter((run) => run.zeros.length).map((run) => el("div", { class: "card warning", role: "note" },
        `${several ? run.name + ": a" : "A"} part of the reward was 0 in every completion: ${run.zeros.join(", ")}.`)));
  }

  function drawSummary() {
    if (!several) {
      $("summary").replaceChildren(...figures(runs[0]).map(([word, value]) => el("div", { class: "card tile" }, el("b", {}, value), el("span", {}, word))));
      return;
    }
    const all = runs.map((run) => new Map(figures(run))), words = [...new Set(all.flatMap((found) => [...found.keys()]))];
    $("summary").className = "many";
    $("summary").replaceChildren(el("div", { class: "card scroll" }, el("table", {}, el("tbody", {}, el("tr", {}, el("th", {}, "run"), ...words.map((word) => el("th", { class: "number" }, word))),
      ...runs.map((run, r) => el("tr", {}, el("td", { class: "name" }, el("i", { class: "swatch", style: `background:${colour(r)}` }), run.name),
        ...words.map((word) => el("td", { class: "number" }, all[r].get(word) || "–"))))))));
  }

  // Samples ------------------------------------------------------------------------------------

  const SHOWN = 100, SUSPICIOUS = 4;
  const MEASURES = {
    advantage: { word: "advantage", diverging: true, of: (tokens) => tokens.advantage },
    entropy: { word: "entropy, nats", diverging: false, of: (tokens) => tokens.entropy },
    gap: { word: "log-probability, trainer minus sampler, nats", diverging: true,
           of: (tokens) => tokens.gap },
    teacher: { word: "log-probability, teacher minus sampler, nats", diverging: true,
               of: (tokens) => tokens.teacher },
  };
  // By step: with the newest first, what a policy does at the end is what is seen first.
  const samples = runs.flatMap((run, r) => run.samples.map((sample) => ({ ...sample, run: r }))).map((sample, at) => ({ ...sample, at })).sort((a, b) => b.step - a.step || a.at - b.at);
  for (const sample of samples) sample.searched = [sample.prompt, sample.completion, sample.answer, sample.reason, sample.task].filter((x) => typeof x === "string").join("\n").toLowerCase();
  const browser = { found: [], limit: SHOWN, chosen: null, colour: "none" };

  const filled = (id) => ($(id).value === "" ? null : Number($(id).value));
  function within(x, name) {
    const from = filled(name + "-from"), to = filled(name + "-to");
    if (from === null && to === null) return true;
    return typeof x === "number" && (from === null || x >= from) && (to === null || x <= to);
  }
  function filter() {
    const words = $("search").value.toLowerCase(), of = $("of-run").value, kind = $("kind").value, reason = $("reason").value;
    browser.found = samples.filter((s) => (!words || s.searched.includes(words)) && (of === "" || s.run === +of) && (kind === "" || s.kind === kind) && (reason === "" || s.reason === reason)
      && within(s.score, "score") && within(s.length, "length") && within(s.step, "step"));
    browser.limit = SHOWN;
    if (!browser.found.includes(browser.chosen)) browser.chosen = browser.found[0] || null;
    drawList(); drawSample();
  }
  const scoreClass = (s) => (s.reason === "correct" ? "good" : s.score <= 0 ? "bad" : "");
  const counted = (n, word) => `${number(n)} ${word}${n === 1 ? "" : "s"}`;

  function drawList() {
    const items = browser.found.slice(0, browser.limit).map((s) => el("div", { class: "item", role: "option", id: "sample-" + s.at, "aria-selected": String(s === browser.chosen), onclick: () => choose(s) },
      el("span", { class: "score " + scoreClass(s) }, number(s.score, 3)), el("span", { class: "text" }, s.completion.trim().slice(0, 160) || "(empty)"),
      el("span", { class: "about" }, [several ? runs[s.run].name : null, `step ${s.step}`, s.kind, s.reason, s.length === undefined ? null : counted(s.length, "token")].filter(Boolean).join(" · "))));
    if (browser.found.length > browser.limit)
      items.push(el("button", { class: "more", type: "button", onclick: () => { browser.limit += SHOWN; drawList(); } }, `${number(browser.found.length - browser.limit)} more`));
    if (!items.length) items.push(el("p", { class: "note" }, samples.length ? "No sample is like that." : data.drawn ? "No samples yet." : "No samples were kept."));
    $("list").replaceChildren(...items);
    $("found").textContent = `${number(browser.found.length)} of ${counted(samples.length, "sample")}.`;
  }
  function choose(sample) {
    browser.chosen = sample;
    for (const item of $("list").children) if (item.role === "option" || item.className === "item") item.setAttribute("aria-selected", String(item.id === "sample-" + sample.at));
    $("list").setAttribute("aria-activedescendant", "sample-" + sample.at);
    drawSample();
  }
  $("list").addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key], at = browser.found.indexOf(browser.chosen) + move;
    if (!move || at < 0 || at >= browser.found.length) return;
    event.preventDefault();
    if (at >= browser.limit) { browser.limit += SHOWN; drawList(); }
    choose(browser.found[at]);
    $("sample-" + browser.found[at].at).scrollIntoView({ block: "nearest" });
  });

  function marked(text) {
    const words = $("search").value.toLowerCase(), parts = [], lower = text.toLowerCase();
    // Where lower case has another length its places are not those of the text.
    if (!words || lower.length !== text.length) return [text];
    let from = 0;
    for (let at = lower.indexOf(words); at >= 0; at = lower.indexOf(words, from)) {
      parts.push(text.slice(from, at), el("mark", {}, text.slice(at, at + words.length)));
      from = at + words.length;
    }
    return [...parts, text.slice(from)];
  }

  const hue = (sign) => (dark.matches ? (sign < 0 ? "255,110,130" : "70,190,255") : sign < 0 ? "225,40,80" : "30,120,235");
  const warm = () => (dark.matches ? "255,165,70" : "240,130,20");
  function shade(x, most, diverging) {
    if (x === null || !most) return "transparent";
    return `rgba(${diverging ? hue(x) : warm()},${(0.75 * Math.min(1, Math.abs(x) / most)).toFixed(3)})`;
  }

  function coloured(tokens, plain) {
    const values = {};
    for (const [name, measure] of Object.entries(MEASURES)) { const found = measure.of(tokens); if (found) values[name] = found.map(finite); }
    const about = el("p", { id: "token", role: "status" }, "Point at a token for its numbers."), scale = el("div", { class: "scale" });
    const spans = tokens.text.map((text, i) => el("span", { onmouseenter: () => say(i), onclick: () => say(i) }, text));
    function say(i) {
      about.textContent = [`token ${i + 1} ${JSON.stringify(tokens.text[i])}`, ...Object.keys(values).map((name) => `${name} ${number(values[name][i], 3)}`),
        tokens.sampler_logprob ? `log-probability ${number(tokens.sampler_logprob[i], 3)}` : null].filter(Boolean).join(" · ");
    }
    function paint(name) {
      browser.colour = name;
      // The text is there once: plain, or in coloured tokens.
      plain.hidden = name !== "none";
      shownTokens.hidden = about.hidden = name === "none";
      const measure = MEASURES[name], shown = values[name];
      const most = shown ? Math.max(0, ...shown.map((x) => Math.abs(x))) : 0;
      spans.forEach((span, i) => (span.style.backgroundColor = shown ? shade(shown[i], most, measure.diverging) : ""));
      scale.hidden = !shown;
      if (shown) scale.replaceChildren(measure.diverging ? number(-most, 3) : "0", el("i", { style: `background:linear-gradient(90deg,${measure.diverging ? shade(-most, most, true) + ",transparent," : "transparent,"}${shade(most, most, measure.diverging)})` }), number(most, 3), el("span", {}, measure.word));
    }
    const shownTokens = el("div", { class: "tokens" }, ...spans);
    const bar = el("div", { class: "bar", id: "colouring" }, el("span", { class: "field" }, "Colour by"));
    if (!values[browser.colour]) browser.colour = "none";
    buttons(bar, [["none", "nothing"], ["advantage", "advantage", !values.advantage], ["entropy", "entropy", !values.entropy], ["gap", "gap to the sampler", !values.gap], ...(values.teacher ? [["teacher", "gap to the teacher"]] : [])], browser.colour, paint);
    const cut = tokens.of > tokens.text.length ? el("p", { class: "note" }, `The first ${number(tokens.text.length)} of ${number(tokens.of)} tokens were kept with their numbers.`) : null;
    paint(browser.colour);
    return [bar, scale, shownTokens, about, cut];
  }

  // One block for each message; rewards belong to the turns of the policy, in order.
  function turns(s) {
    let turn = 0;
    return el("div", { id: "completion" }, ...s.messages.map(({ role, content, truncated }) => {
      const own = role === "assistant", reward = own ? (s.turn_rewards || [])[turn++] : undefined;
      const about = [own ? `turn ${turn}` : role, reward === undefined ? null : `reward ${number(reward, 3)}`, truncated ? "cut" : null].filter(Boolean).join(" · ");
      return el("div", { class: own ? "turn own" : "turn" }, el("span", { class: "about" }, about), el("pre", {}, ...marked(content)));
    }));
  }

  function drawSample() {
    const s = browser.chosen;
    $("sample").hidden = !s;
    if (!s) return;
    const fact = (word, value, kind) => (value === undefined || value === null ? null : el("div", {}, el("dt", {}, word), el("dd", { class: kind || "" }, value)));
    const block = (word, text) => (text === undefined || text === null || text === "" ? [] : [el("h3", {}, word), el("pre", {}, ...marked(typeof text === "string" ? text : JSON.stringify(text)))]);
    const plain = s.messages ? turns(s) : el("pre", { id: "completion" }, ...marked(s.completion));
    $("sample").replaceChildren(...[
      el("dl", {}, fact("score", number(s.score), scoreClass(s)), fact("reason", s.reason), fact("step", number(s.step)), fact("kind", s.kind), fact("tokens", s.length === undefined ? null : number(s.length) + (s.truncated ? ", cut" : "")),
        fact("task", s.task), several ? fact("run", runs[s.run].name) : null, ...Object.entries(s.rewards || {}).map(([name, value]) => fact(name, number(value)))),
      ...block("Prompt", s.prompt), el("h3", {}, s.messages ? "Conversation" : "Completion"), plain,
      ...(s.tokens ? coloured(s.tokens, plain).filter(Boolean) : []), ...block("Answer", s.answer),
      s.conversation ? el("details", {}, el("summary", {}, "as the policy reads it, special tokens included"), el("pre", {}, ...marked(s.conversation))) : null].filter(Boolean));
    $("sample").scrollTop = 0;
  }

  function options(id, first, values) {
    $(id).replaceChildren(el("option", { value: "" }, first), ...values.map(([value, word]) => el("option", { value }, word)));
    $(id).parentElement.hidden = values.length < 2;
  }

  // Settings -----------------------------------------------------------------------------------

  const written = (value) => (value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));
  function drawSettings() {
    const groups = [["Versions", (run) => run.versions], ["Run", (run) => run.config.run || {}], ["Hyperparameters", (run) => ({ recipe: run.config.recipe, ...run.config.hyperparameters })]];
    const words = $("setting").value.toLowerCase(), only = $("differing").checked, rows = [];
    for (const [title, of] of groups) {
      const found = runs.map(of), names = [...new Set(found.flatMap((values) => Object.keys(values)))], lines = [];
      for (const name of names) {
        const values = found.map((group) => written(group[name])), differs = new Set(values).size > 1;
        if ((only && !differs) || !(name + " " + values.join(" ")).toLowerCase().includes(words)) continue;
        lines.push(el("tr", { class: differs ? "differs" : "" }, el("td", {}, name), ...values.map((value) => el("td", {}, value))));
      }
      if (lines.length) rows.push(el("tr", { class: "head" }, el("th", {}, title), ...runs.map((run) => el("th", {}, several ? run.name : ""))), ...lines);
    }
    $("settings-table").replaceChildren(el("tbody", {}, ...(rows.length ? rows : [el("tr", {}, el("td", {}, "No setting is like that."))])));
  }

  // The page -----------------------------------------------------------------------------------

  const progress = data.drawn ? `running, drawn ${data.drawn}` : null;
  $("subtitle").textContent = several ? counted(runs.length, "run") + " side by side" : [runs[0].config.run && runs[0].config.run.task, runs[0].config.recipe, runs[0].config.run && runs[0].config.run.model, progress].filter(Boolean).join(" · ");
  drawSuspicion();
  drawSummary();
  buttons($("axis"), [["step", "steps"], ["tokens", "tokens", !runs.some((run) => has(run, "training/total_tokens"))], ["time", "time", !runs.some((run) => has(run, "perf/time_per_step"))]], "step", (key) => { state.axis = key; drawCharts(); });
  $("smooth").addEventListener("input", () => { state.smooth = +$("smooth").value; $("smooth-value").textContent = state.smooth ? `${state.smooth} points` : "off"; drawCharts(); });
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].sort();
  $("metrics").append(...names.map((name) => el("option", { value: name })));
  $("metric").addEventListener("input", () => {
    const name = $("metric").value;
    if (!names.includes(name)) return;
    $("metric").value = "";
    if (!state.added.includes(name)) state.added.push(name);
    drawCharts();
    $("charts").lastElementChild.scrollIntoView({ block: "nearest" });
  });
  const cut = runs.filter((run) => run.steps.length < run.lines);
  $("thinned").hidden = !cut.length;
  $("thinned").textContent = cut.map((run) => `${run.name}: ${number(run.steps.length)} of ${number(run.lines)} lines of metrics.jsonl are drawn, evenly spaced, evaluations all.`).join(" ");

  options("of-run", "all", several ? runs.map((run, r) => [r, run.name]) : []);
  for (const [id, field] of [["kind", "kind"], ["reason", "reason"]]) options(id, "any", [...new Set(samples.map((s) => s[field]).filter((x) => typeof x === "string"))].sort().map((x) => [x, x]));
  const missing = runs.reduce((sum, run) => sum + run.num_samples - run.samples.length, 0);
  $("left-out").textContent = missing ? `${counted(missing, "more")} in samples.jsonl did not fit here.`.replace("mores", "more") : "";
  $("filters").addEventListener("input", filter);
  $("filters").addEventListener("reset", () => setTimeout(filter));
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  filter();
  // A run in its first minutes: nothing to search or to draw yet.
  for (const part of [$("filters"), $("found").parentElement]) part.hidden = !samples.length;
  const begun = runs.some((run) => run.lines);
  $("curves-bar").hidden = !begun;
  $("waiting").hidden = begun;
  $("differing-field").hidden = !several;
  for (const id of ["setting", "differing"]) $(id).addEventListener("input", drawSettings);
  drawSettings();
  drawProfiles();
  $("footer").textContent = `Drawn from metrics.jsonl and samples.jsonl by jrl, with uPlot ${data.uplot} (MIT).`;
  drawCharts();
  dark.addEventListener("change", () => { drawSummary(); drawCharts(); drawSample(); });
})();
