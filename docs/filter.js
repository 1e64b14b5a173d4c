// A field above every long table that hides the rows without the words in it.
document$.subscribe(() => {
  for (const table of document.querySelectorAll(".wide table")) {
    const rows = [...table.tBodies[0].rows];
    if (rows.length < 40) continue;
    const field = document.createElement("input");
    field.type = "search";
    field.placeholder = `Filter ${rows.length} rows`;
    field.className = "filter";
    field.setAttribute("aria-label", "Filter the rows of the table");
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    });
    (table.closest(".md-typeset__scrollwrap") || table).before(field);
  }
});
