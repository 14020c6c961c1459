// How the search of the site ranks its results: Sphinx puts this file, `html_search_scorer`, beside
// its own script, whose index is `Search._index`.
//
// Sphinx finds pages that have all words of a query, and knows of a page only whether a word is in
// its headings. Here rare words are left out if hardly a page has all, and a page comes first if its
// title, a heading or an entry of the index says what the query says. Rare words count most.

const FEW = 4; // pages, or fewer, that have all words: look for pages with some of the words
const WORDS = 20; // points of a page that has all words
const SUBJECT = 60; // points of a page about the query and nothing else
const HEADING = 0.6; // of those, for a heading within a page
const TABLES = 0.5; // of those, for a page of results: measurements, not explanations

var Scorer = {
  score: ([page, title, anchor, description, score, file, kind]) => {
    if (kind === "index") return score;
    return score + (kind === "object" ? WORDS : ranking.points(page));
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

/** Return the words of a query, without those that would leave few pages or none. */
var splitQuery = (query) => {
  let words = query.split(/[^\p{Letter}\p{Number}_]+/gu).filter((word) => word);
  while (words.length > 1) {
    const pages = words.map(ranking.pagesWith);
    const common = pages.reduce((all, some) => all.filter((page) => some.includes(page)));
    if (new Set(common).size > FEW) break;
    const fewest = Math.min(...pages.map((some) => some.length));
    words = words.filter((word, i) => i !== pages.findIndex((some) => some.length === fewest));
  }
  return words;
};

const ranking = {
  stemmer: new Stemmer(),

  /** Return the stems of the words of a text, also of those within a name: `top_k` has two. */
  stems: (text) =>
    new Set(
      text
        .replace(/(?<=\p{Lowercase})(?=\p{Uppercase})/gu, " ") // LayerNorm: two words
        .toLowerCase()
        .split(/[^\p{Letter}\p{Number}]+/gu)
        .filter((word) => word)
        .map((word) => ranking.stemmer.stemWord(word)),
    ),

  /** Return the numbers of the pages that have a word, or a longer one around it. */
  pagesWith: (word) => {
    const { terms, titleterms, docnames } = Search._index;
    if (stopwords.has(word.toLowerCase()) || /^\d+$/.test(word)) return [...docnames.keys()];
    const stem = ranking.stemmer.stemWord(word.toLowerCase());
    return [terms, titleterms].flatMap((table) => {
      if (Object.hasOwn(table, stem)) return table[stem];
      if (stem.length < 3) return [];
      return Object.keys(table).flatMap((term) => (term.includes(stem) ? table[term] : []));
    });
  },

  weights: new Map(),

  /** Return how much a word tells: more if fewer pages have it. */
  weight: (stem) => {
    if (stopwords.has(stem)) return 0.5;
    if (!ranking.weights.has(stem)) {
      const pages = new Set(ranking.pagesWith(stem)).size;
      ranking.weights.set(stem, Math.log(2 + Search._index.docnames.length / (1 + pages)));
    }
    return ranking.weights.get(stem);
  },

  /** Return the points of a page, from its words and its subject. */
  points: (page) => (ranking.pages ||= ranking.pagesWithPoints()).get(page) || 0,

  pagesWithPoints: () => {
    const { docnames, titles, alltitles, indexentries } = Search._index;
    const query = new URLSearchParams(window.location.search).get("q");
    const asked = ranking.stems(query);
    const sum = (stems) => [...stems].reduce((total, stem) => total + ranking.weight(stem), 0);
    const words = docnames.map(() => new Set());
    for (const stem of asked)
      for (const page of ranking.pagesWith(stem)) words[page].add(stem);

    const subjects = docnames.map(() => 0);
    const joined = [...asked].join("");
    const rate = (page, text, most) => {
      const said = ranking.stems(text);
      const common = [...said].filter((stem) => asked.has(stem));
      const whole = [...said].join("") === joined; // "data loader" and "dataloader"
      if (!common.length && !whole) return;
      const closeness = whole ? 1 : sum(common) / sum(new Set([...asked, ...said]));
      const kind = docnames[page].startsWith("docs/results/") ? TABLES : 1;
      subjects[page] = Math.max(subjects[page], most * kind * closeness);
    };
    for (const [title, pages] of Object.entries(alltitles))
      for (const [page] of pages) rate(page, title, titles[page] === title ? 1 : HEADING);
    for (const [entry, pages] of Object.entries(indexentries))
      for (const [page, , main] of pages) if (main) rate(page, entry, 1);

    const points = (page) => (WORDS * sum(words[page])) / sum(asked) + SUBJECT * subjects[page];
    return new Map(docnames.map((name, page) => [name, points(page)]));
  },
};
