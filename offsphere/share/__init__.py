"""Files that the code reads: recipes, models, claims, published tables. Imports nothing heavy.

Recipes and published tables are edited in configs/ and results/published. The two links beside this
file lead there, and building a wheel follows them, so that an installed package holds copies under
the same names. What lanes call their figures, columns and metrics stands here, because the library
that shows them knows no lane.
"""

from pathlib import Path

CONFIGS = Path(__file__).parent / "configs"
PUBLISHED = Path(__file__).parent / "published"
FIGURES = Path(__file__).parent / "figures.yaml"
MEASURES = Path(__file__).parent / "measures.yaml"
WORDS = Path(__file__).parent / "words.yaml"
TASKS = Path(__file__).parent / "tasks.json"
"""What each script declares as its TASK, for plans that were written before they recorded it."""
ADDED = Path(__file__).parent / "added.yaml"
