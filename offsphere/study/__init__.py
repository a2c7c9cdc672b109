"""A study is data: a grid of runs and the engines that execute it. Knows no lane."""
