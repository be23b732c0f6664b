(() => {
  "use strict";
  const contents = document.querySelector(".toc");
  for (const heading of document.querySelectorAll("main section[id] > h2")) {
    const link = contents.appendChild(document.createElement("a"));
    link.href = `#${heading.parentElement.id}`;
    link.textContent = heading.textContent;
  }
})();
