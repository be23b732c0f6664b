(() => {
  "use strict";
  const buttons = [...document.querySelectorAll("[data-run]")];
  const kept = history.state; // survives a reload, also of a file
  if (kept?.scroll !== undefined) {
    for (const button of buttons) if (kept.hidden.includes(button.dataset.run)) button.click();
    document.querySelectorAll("details").forEach((details, place) => { details.open = kept.open.includes(place); });
    scrollTo(0, kept.scroll);
  }
  history.scrollRestoration = "manual";
  const seconds = Number(document.querySelector("[data-refresh]")?.dataset.refresh ?? 0);
  if (seconds === 0) return;
  setTimeout(() => {
    const open = [...document.querySelectorAll("details")].flatMap((details, place) => (details.open ? [place] : []));
    const hidden = buttons.filter((button) => button.getAttribute("aria-pressed") === "false").map((button) => button.dataset.run);
    history.replaceState({ scroll: scrollY, hidden, open }, "");
    location.reload();
  }, 1000 * seconds);
})();
