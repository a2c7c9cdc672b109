"""offsphere: when does embedding magnitude matter? (Importing this package imports no torch.)"""

__version__ = "0.1.0"
