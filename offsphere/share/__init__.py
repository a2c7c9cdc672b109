"""Files that the code reads: recipes, models, claims, published tables. Imports nothing heavy.

They are edited in configs/ and results/published. The two links beside this file lead there, and
building a wheel follows them, so that an installed package holds copies under the same names.
"""

from pathlib import Path

CONFIGS = Path(__file__).parent / "configs"
PUBLISHED = Path(__file__).parent / "published"
MEASURES = Path(__file__).parent / "measures.yaml"
