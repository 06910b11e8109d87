"""Several devices against one."""
