"""The optimisation problem: as data (``problem``), made smaller (``contract``), written as an ILP (``formulate``), solved."""
