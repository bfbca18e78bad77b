// Themes, and drawing it all.

const THEMES = { system: "", light: "light", dark: "dark" };

function setTheme(name) {
  document.documentElement.style.colorScheme = THEMES[name];
  at("theme").lastElementChild.textContent = `Theme: ${name}`;
  at("theme").setAttribute("aria-label", `Theme: ${name}`);
  at("theme").dataset.theme = name;
  for (const id of drawn) draw(id); // charts are pictures: they take their colours when drawn
}

function theme() {
  at("theme").addEventListener("click", () => {
    const names = Object.keys(THEMES);
    setTheme(names[(names.indexOf(at("theme").dataset.theme) + 1) % names.length]);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const id of drawn) draw(id);
  });
  setTheme("system");
}

header();
const root = block(0);
at("tree").append(root);
root.open = true;
root.fill();
memory();
kernels();
reports();
compileTime();
theme();
charts();
document.documentElement.dataset.ready = performance.now().toFixed(0);
