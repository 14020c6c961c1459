"""The site: `make docs`. Its sources are copies of the documents, in folders as here."""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_ext")]

import tensorgrad  # noqa: E402

about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
repository = about["urls"]["Repository"]

project = "tensorgrad"
author = about["authors"][0]["name"]
copyright = f"{author}, {about['license']} licence"
version = release = tensorgrad.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    # In docs/_ext:
    *("sources", "reference", "docstrings", "links", "glossary_links", "source_code"),
    *("formulas", "search", "versions"),
]
root_doc = "index"
nitpicky = True
smartquotes_action = "D"  # dashes alone: shapes are (..., C)
suppress_warnings = ["misc.highlighting_failure"]  # commands in the notebook that go over lines

# Markdown as a code host renders it: links to headings by their slugs, formulas between dollars.
myst_heading_anchors = 6
myst_enable_extensions = ["dollarmath"]
myst_dmath_allow_labels = False
myst_dmath_allow_digits = False  # $5 and $6 are prices
html_math_renderer = "mathml"
nb_execution_mode = "off"

# Docstrings are plain text with names in backquotes.
default_role = "py:obj"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [
    *("Source", "Formula", "Gradient", "Gradients"),
    ("Attributes", "params_style"),
    ("A subclass sets", "params_style"),
    ("A training loop sets", "params_style"),
    ("Attributes of every strategy", "params_style"),
]
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

# Names of other libraries that annotations mention, and their pages: see docs/_inventories.
intersphinx_mapping = {
    name: (address, str(ROOT / "docs" / "_inventories" / f"{name}.txt"))
    for name, address in {
        "python": "https://docs.python.org/3/",
        "numpy": "https://numpy.org/doc/stable/",
        "cupy": "https://docs.cupy.dev/en/stable/",
    }.items()
}

html_theme = "furo"
html_title = f"{project} {version}"
html_static_path = [str(ROOT / "docs" / "_static")]
html_css_files = ["custom.css"]
html_js_files = ["versions.js"]
templates_path = [str(ROOT / "docs" / "_templates")]
html_sidebars = {
    "**": [
        *("sidebar/brand.html", "sidebar/versions.html", "sidebar/search.html"),
        *("sidebar/scroll-start.html", "sidebar/navigation.html", "sidebar/scroll-end.html"),
    ]
}
html_copy_source = False
html_show_sphinx = False
html_search_scorer = str(ROOT / "docs" / "_ext" / "search.js")
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
