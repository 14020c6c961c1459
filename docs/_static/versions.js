// The menu of versions. Each version is a folder of its own, and versions.js beside them lists all:
// a script, as a page that was opened from a disk may not read other files.

document.addEventListener("DOMContentLoaded", () => {
  const menu = document.querySelector(".versions");
  const list = menu.querySelector("select");
  const script = document.createElement("script");
  script.src = `${menu.dataset.root}../versions.js`;
  script.onload = () => {
    for (const version of VERSIONS) {
      list.add(new Option(version, version, false, version === menu.dataset.version));
    }
    menu.hidden = false;
  };
  list.onchange = () => {
    location.href = `${menu.dataset.root}../${list.value}/index.html`;
  };
  document.head.append(script);
});
