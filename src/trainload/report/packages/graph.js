"use strict";
// Filter the tree of modules. Without this script everything is in the page, and the search is hidden.
(() => {
  const form = document.querySelector(".search");
  const input = document.getElementById("search");
  const found = document.getElementById("found");
  const modules = [...document.querySelectorAll(".tree details")].map((element) => ({
    element,
    wasOpen: element.open,
    isModule: !element.classList.contains("apart"),
    name: element.classList.contains("apart") ? "" : element.querySelector("summary b").textContent.toLowerCase(),
    rows: [...element.querySelectorAll(":scope > .own tr")].map((row) => ({
      element: row,
      text: row.textContent.toLowerCase(),
    })),
  }));
  // the path of a module, without the name of the root; operators apart have that of their module
  const all = new Map();
  for (const module of modules) {
    all.set(module.element, module);
    const around = module.element.parentElement.closest("details");
    const before = around ? all.get(around).path : null;
    if (before === null) module.path = "";
    else if (!module.isModule) module.path = before;
    else module.path = before ? `${before}.${module.name}` : module.name;
  }
  const restore = () => {
    for (const module of modules) {
      module.element.hidden = false;
      module.element.open = module.wasOpen;
      for (const row of module.rows) row.element.hidden = false;
    }
    found.textContent = "";
  };
  const filter = () => {
    const wanted = input.value.trim().toLowerCase();
    if (!wanted) {
      restore();
      return;
    }
    let rows = 0;
    let named = 0;
    // from the innermost modules outwards: a module with a match inside stays and opens
    const visible = new Set();
    for (const module of [...modules].reverse()) {
      const isNamed = module.path.includes(wanted);
      let inside = 0;
      for (const row of module.rows) {
        const matches = row.text.includes(wanted);
        row.element.hidden = !matches && !isNamed;
        inside += matches;
      }
      rows += inside;
      named += isNamed && module.isModule;
      const hasChild = visible.has(module.element);
      module.element.hidden = !(isNamed || inside || hasChild);
      module.element.open = inside > 0 || hasChild;
      const parent = module.element.parentElement.closest("details");
      if (parent && !module.element.hidden) visible.add(parent);
    }
    found.textContent = `${named} modules and ${rows} lines match`;
  };
  form.addEventListener("submit", (event) => event.preventDefault());
  input.addEventListener("input", filter);
  form.hidden = false;
})();
