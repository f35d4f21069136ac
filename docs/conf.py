"""Sphinx configuration: `nox -s docs` builds the pages with every warning an error."""

import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "Forge"
author = "the authors of Forge"
version = release = metadata.version("forge-core")

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_nb",  # includes myst_parser
    "forge_api",
    "forge_notebooks",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "Forge"
html_search_scorer = str(Path(__file__).parent / "_ext" / "search_scorer.js")

nb_execution_mode = "cache"  # notebooks run again when they change
nb_execution_in_temp = True
nb_execution_timeout = 900  # seconds of a cell, also on a busy machine
nb_execution_raise_on_error = True

myst_heading_anchors = 3  # links such as page.md#heading work as they do on a code host
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]

default_role = "code"  # in docstrings, `name` is code
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_mock_imports = ["lmms_eval"]  # an extra that excludes others
autodoc_inherit_docstrings = False  # torch's docstrings are torch's
autodoc_class_signature = "separated"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100

# Annotations of names that are imported for type checkers only are not resolved, and two modules may have such a name.
suppress_warnings = ["ref.python"]
