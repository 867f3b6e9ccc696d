def comparison_page(*a):
    return ""
