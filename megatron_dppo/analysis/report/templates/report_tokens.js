(() => {
  "use strict";
  const lists = JSON.parse(document.getElementById("token-lists").textContent);
  const count = (value) => value.toLocaleString("en").replaceAll(",", "\u202f");
  const digits = (value) => (Math.abs(value) < 1e-3 && value !== 0 ? value.toExponential(1) : String(Number(value.toPrecision(3))));
  const number = (value) => (value === null ? "–" : digits(value).replaceAll("-", "−"));

  function add(parent, tag, text, className = "") {
    const element = parent.appendChild(document.createElement(tag));
    element.textContent = text;
    element.className = className;
    return element;
  }

  function row([token, id, num, share, mu, pi, entropy, tv]) {
    const line = document.createElement("tr");
    add(add(line, "th", ""), "code", token).parentElement.scope = "row";
    for (const text of [id, count(num), `${(100 * share).toFixed(1)} %`, ...[mu, pi, tv, entropy].map(number)]) add(line, "td", text, "number");
    return line;
  }

  function fill(details) {
    const choice = details.querySelector("select");
    if (!choice) return;
    const preset = lists[details.dataset.tokens].presets[choice.value];
    for (const part of details.querySelectorAll("[data-sign]")) {
      const rows = preset[part.dataset.sign];
      part.querySelector("h3 span").textContent = `${count(preset[`num_${part.dataset.sign}`])} masked`;
      part.querySelector(".scroll").hidden = rows.length === 0;
      part.querySelector("tbody").replaceChildren(...rows.map(row));
    }
  }

  function context(token) {
    const item = document.createElement("li");
    const text = add(item, "p", "", "context");
    const isPositive = token.sign === "+";
    text.append(token.before);
    add(text, "mark", token.token, isPositive ? "positive" : "negative");
    text.append(token.after);
    const [mu, pi, divergence, advantage] = [token.mu, token.pi, token.divergence, token.advantage].map(number);
    const facts = add(item, "p", `${isPositive ? "A > 0" : "A < 0"}: μ ${mu}, π ${pi}, divergence ${divergence}, advantage ${advantage}; gradient step ${token.step} of rollout ${token.rollout}, `, "facts");
    if (token.link === undefined) {
      facts.append(`sample ${token.sample}, its token ${token.position + 1}`);
    } else {
      facts.append(`token ${token.place} of the response in `);
      add(facts, "a", `${token.file}, line ${token.line}`).href = token.link;
      facts.append(` (${token.sample})`);
    }
    return item;
  }

  for (const details of document.querySelectorAll("[data-tokens]")) {
    details.addEventListener("toggle", () => details.open && fill(details));
    details.querySelector("select")?.addEventListener("change", () => fill(details));
    if (details.open) fill(details);
    const contexts = details.querySelector(".contexts");
    contexts?.addEventListener("toggle", () => {
      const tokens = lists[details.dataset.tokens].farthest;
      if (contexts.open) contexts.querySelector("ol").replaceChildren(...tokens.map(context));
    });
  }
})();
