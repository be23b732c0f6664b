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

  for (const details of document.querySelectorAll("[data-tokens]")) {
    details.addEventListener("toggle", () => details.open && fill(details));
    details.querySelector("select")?.addEventListener("change", () => fill(details));
    if (details.open) fill(details);
  }
})();
