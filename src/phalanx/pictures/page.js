for (const table of document.querySelectorAll("table.sorts")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const key = (row, at) => {
    const text = row.cells[at].dataset.value ?? row.cells[at].textContent;
    return text !== "" && !isNaN(text) ? Number(text) : text;
  };
  heads.forEach((head, at) => head.dataset.sort !== undefined && head.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...body.rows].sort((a, b) => {
      const x = key(a, at), y = key(b, at);
      return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
    });
    body.append(...rows);
  }));
}
document.documentElement.dataset.ready = "";
