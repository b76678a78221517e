"""Model checks of core: a fake worker, a whole world around one scheduler, random traffic."""
