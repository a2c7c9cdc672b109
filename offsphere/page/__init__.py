"""Self-contained web pages and paper figures: one HTML engine, one chart engine. No torch."""
